"""Drafters that open their stream by themselves and show a token, over real loopback gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.net.allowance import MESSAGE_UNITS
from outrider.net.conversation import converse
from outrider.net.rpc import bind, channel, new_server
from outrider.wire.description import ModelInfo, WorkerInfo
from outrider.wire.drafter_sessions import DraftEndCause, DraftEnded, DrafterEvents, ReachVerifier
from outrider.wire.hello import Identity, Role
from outrider.wire.load import DrafterLoad
from outrider.wire.methods import JOIN
from router import joins as joins_module
from router.api.keys import ApiKey, digest
from router.drafter_choice import Wanted
from router.joins import Joins
from router.live import service
from router.registration_limits import BURST_BYTES
from tests.router.asking import Running, committed, finished, request

TOKEN, OTHER = "dt-outrider-one", "dt-outrider-two"
MODEL = ModelInfo("small", "weights", "Arch", 1000, 100, 64, (0,), "cpu", "float32", True)
INFO = WorkerInfo(Identity(Role.DRAFTER, "laptop", 1, "weights", "tokens"), MODEL, 8, 16)


@dataclass
class Door:
    """Where drafters join, and the tokens that are in force."""

    address: str
    tokens: list[ApiKey]
    now: float = 0.0

    @asynccontextmanager
    async def stream(
        self, token: str | None = TOKEN, info: WorkerInfo | None = INFO
    ) -> AsyncIterator[Stream]:
        async with channel(self.address) as connection:
            call = converse(connection, JOIN, token=token)
            try:
                with suppress(grpc.aio.AioRpcError):  # it may be refused before it has spoken
                    await call.write(DrafterEvents(info=info))
                yield Stream(call)
            finally:
                call.cancel()

    async def refusal(self, **shown: Any) -> tuple[grpc.StatusCode, str]:
        async with self.stream(**shown) as stream:
            return await stream.end()


class Stream:
    """A drafter's end."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._heard = call.heard()

    async def greeted(self) -> Any:
        command = await self.next()
        assert command.hello is not None and command.hello.role == Role.ROUTER
        await self.say(hello=INFO.identity.hello())
        return self

    async def say(self, **events: Any) -> None:
        await self._call.write(DrafterEvents(**events))

    async def next(self) -> Any:
        """What it is told next, but for verifiers that it is to reach."""
        while isinstance((told := await anext(self._heard)).command, ReachVerifier):
            pass
        return told

    async def end(self) -> tuple[grpc.StatusCode, str]:
        """How the router ends it."""
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            while True:
                await self.next()
        return ended.value.code(), ended.value.details() or ""


@pytest.fixture
async def door(rig: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Door]:
    monkeypatch.setattr(joins_module, "LOOK_SECONDS", 0.01)
    tokens = [ApiKey("alice", digest(TOKEN), max_concurrent=2), ApiKey("bob", digest(OTHER))]
    server = new_server()
    made = Door(bind(server, "127.0.0.1", 0), tokens)
    Joins(lambda: made.tokens, rig.discovery, rig.fleet, lambda: made.now).add_to(server)
    await server.start()
    yield made
    await server.stop(None)


def refused(rig: Any, reason: str) -> float:
    return float(rig.metrics.registrations_refused.labels(reason)._value.get())


async def test_a_drafter_that_joined_drafts_as_any_other(rig: Any, door: Door) -> None:
    verifier = await rig.verifier()
    async with door.stream() as stream:
        await stream.greeted()
        await rig.until(lambda: "laptop" in rig.fleet.drafters)
        running = Running(rig, request())
        sid = (await verifier.next_command("open")).session_id
        opened = (await stream.next()).command
        assert (opened.session_id, opened.verifier_address) == (sid, verifier.address)
        await stream.say(load=DrafterLoad(1, round_trips={verifier.address: 0.08}))
        await rig.until(lambda: rig.fleet.drafters["laptop"].load.sessions == 1)
        told: Any = service(rig.fleet, rig.sessions.open)
        assert told["drafters"][0]["round_trips"] == [{"verifier": "v", "seconds": 0.08}]
        assert told["pairs"] == [{"verifier": "v", "drafter": "laptop", "sessions": 1}]
        assert rig.metrics.connected.labels("drafter")._value.get() == 1
        await stream.say(ended=[DraftEnded(sid, DraftEndCause.UNFIT, "no", opened.opening)])
        await rig.until(lambda: not rig.fleet.drafters["laptop"].has_sessions)
        verifier.say(**committed(sid, 3, 3), **finished(sid))
        await running.task
    await rig.until(lambda: not rig.fleet.drafters)


@pytest.mark.parametrize("shown", [None, "dt-outrider-none", "sk-outrider-key", ""])
async def test_who_shows_no_token_that_is_in_force_is_refused(
    rig: Any, door: Door, shown: str | None
) -> None:
    code, sentence = await door.refusal(token=shown)
    assert code is grpc.StatusCode.UNAUTHENTICATED and "the token is not known here" in sentence
    assert refused(rig, "token") == 1 and not rig.fleet.drafters


async def test_a_token_that_is_taken_away_ends_the_stream_of_its_bearer_alone(rig: Any, door: Door) -> None:
    bobs = replace(INFO, identity=replace(INFO.identity, worker_id="bobs"))
    async with door.stream() as stream, door.stream(OTHER, bobs) as other:
        await stream.greeted()
        await other.next()
        await other.say(hello=bobs.identity.hello())
        await rig.until(lambda: len(rig.fleet.drafters) == 2)
        door.tokens = door.tokens[1:]
        assert await stream.end() == (grpc.StatusCode.UNAUTHENTICATED, "the token is not in force any more")
        await rig.until(lambda: list(rig.fleet.drafters) == ["bobs"])


async def test_a_drafter_that_comes_by_another_network_takes_its_own_place(rig: Any, door: Door) -> None:
    async with door.stream() as before:
        await before.greeted()
        await rig.until(lambda: "laptop" in rig.fleet.drafters)
        former = rig.fleet.drafters["laptop"]
        async with door.stream() as after:
            await after.greeted()
            await rig.until(lambda: rig.fleet.drafters.get("laptop") not in (None, former))
            code, sentence = await door.refusal(token=OTHER)
            assert code is grpc.StatusCode.ALREADY_EXISTS and "laptop is here already" in sentence
            assert refused(rig, "id_in_use") == 1
        await rig.until(lambda: not rig.fleet.drafters)


async def test_who_registered_comes_before_who_joined_with_its_id(rig: Any, door: Door) -> None:
    await rig.verifier()
    async with door.stream() as stream:
        await stream.greeted()
        await rig.until(lambda: "laptop" in rig.fleet.drafters)
        await rig.drafter("laptop")
        assert not rig.fleet.drafters["laptop"].joined
        assert (await stream.end())[0] is grpc.StatusCode.UNAVAILABLE
    async with door.stream() as late:
        await late.greeted()
        assert (await late.end())[0] is grpc.StatusCode.ALREADY_EXISTS
    assert not rig.fleet.drafters["laptop"].joined


async def test_a_token_makes_nobody_a_verifier(rig: Any, door: Door) -> None:
    verifier = replace(INFO, identity=replace(INFO.identity, role=Role.VERIFIER))
    code, sentence = await door.refusal(info=verifier)
    assert code is grpc.StatusCode.FAILED_PRECONDITION and "expected a drafter" in sentence
    code, sentence = await door.refusal(info=None)
    assert code is grpc.StatusCode.INVALID_ARGUMENT and "says first what it is" in sentence
    assert not rig.fleet.verifiers and not rig.fleet.drafters


async def test_so_many_drafters_join_with_a_token_and_no_more(rig: Any, door: Door) -> None:
    def named(worker_id: str) -> WorkerInfo:
        return replace(INFO, identity=replace(INFO.identity, worker_id=worker_id))

    async with door.stream(info=named("a")) as one, door.stream(info=named("b")) as other:
        await one.next()
        await other.next()
        code, sentence = await door.refusal(info=named("c"))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "2 drafters have joined with this token" in sentence
        async with door.stream(info=named("a")) as again:  # by another network
            assert (await again.next()).hello is not None


async def test_of_several_that_come_at_once_by_other_networks_one_has_the_place(rig: Any, door: Door) -> None:
    """The one that was counted nowhere had left its place to another drafter."""

    def named(worker_id: str) -> WorkerInfo:
        return replace(INFO, identity=replace(INFO.identity, worker_id=worker_id))

    async def stay(stream: Stream) -> None:
        with suppress(grpc.aio.AioRpcError):
            await stream.greeted()
            while True:
                await stream.next()

    async with AsyncExitStack() as stack, asyncio.TaskGroup() as streams:
        before = streams.create_task(stay(await stack.enter_async_context(door.stream())))
        await rig.until(lambda: "laptop" in rig.fleet.drafters)
        at_once = [door.stream() for _ in range(4)]
        opened = await asyncio.gather(*map(stack.enter_async_context, at_once))
        after = [streams.create_task(stay(stream)) for stream in opened]
        await rig.until(lambda: before.done() and sum(not task.done() for task in after) == 1)
        await rig.until(lambda: "laptop" in rig.fleet.drafters)
        async with door.stream(info=named("other")) as other:
            await other.next()
            code, _ = await door.refusal(info=named("one more"))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        for task in after:
            task.cancel()


async def test_who_comes_and_goes_comes_anew_each_time(
    rig: Any, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time all sessions without a drafter look at it."""
    monkeypatch.setattr("router.registration_limits.MOST_WORKERS", 3)
    for _ in range(4):  # the last one is on credit
        async with door.stream() as stream:
            await stream.next()
        await rig.until(lambda: not rig.fleet.drafters)
    code, sentence = await door.refusal()
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "come anew too often" in sentence
    door.now += 1.0
    async with door.stream() as stream:
        assert (await stream.next()).hello is not None


async def test_what_a_drafter_says_that_it_is_counts_before_it_is_read(
    rig: Any, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 250 KB takes the loop 5 ms: twenty a second had others' four tokens take seconds."""
    large = replace(INFO, model=replace(MODEL, eos_token_ids=(1,) * 250_000))
    read, from_bytes = list[int](), JOIN.asked.from_bytes

    def counted(raw: bytes) -> Any:
        read.append(len(raw))
        return from_bytes(raw)

    monkeypatch.setattr(JOIN.asked, "from_bytes", counted)
    for number in range(60):
        identity = replace(INFO.identity, worker_id=f"w{number}")
        with suppress(grpc.aio.AioRpcError):
            async with door.stream(info=replace(large, identity=identity)) as stream:
                await stream.greeted()
    found = len([size for size in read if size >= 250_000])
    assert BURST_BYTES // 300_000 < found <= BURST_BYTES // 250_000
    code, sentence = await door.refusal(info=large)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "too much is registered" in sentence
    async with door.stream(token=OTHER) as stream:
        await stream.greeted()


async def test_who_says_too_much_is_cut_off_with_its_token(rig: Any, door: Door) -> None:
    ended = [DraftEnded(b"s" * 16, DraftEndCause.FAILED, "x" * 900, 1)] * 256
    async with door.stream() as stream:
        await stream.greeted()
        for _ in range(8):
            await stream.say(ended=ended)
        code, sentence = await stream.end()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "cut off for 60 seconds" in sentence
    assert (await door.refusal())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    door.now += 61
    async with door.stream() as again:
        await again.greeted()
        await rig.until(lambda: "laptop" in rig.fleet.drafters)


async def test_what_drafters_of_one_token_say_counts_together(
    rig: Any, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty, each within its own bounds, had taken a quarter of a processor from a router's sessions."""
    monkeypatch.setattr(joins_module, "TOKEN_BYTES", (1e-9, 300 * MESSAGE_UNITS))
    other_info = replace(INFO, identity=replace(INFO.identity, worker_id="other"))
    async with door.stream() as one, door.stream(info=other_info) as other:
        await one.greeted()
        await other.next()
        await other.say(hello=other_info.identity.hello())
        with suppress(grpc.aio.AioRpcError):
            for _ in range(200):
                await one.say(load=DrafterLoad())
                await other.say(load=DrafterLoad())
        for stream in (one, other):
            code, sentence = await stream.end()
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "cut off for 60 seconds" in sentence


async def test_only_verifiers_that_take_them_are_given_to_them(rig: Any, door: Door) -> None:
    closed = await rig.worker(Role.VERIFIER, "closed")
    closed.takes_joined = False
    closed.register(rig.address)
    await rig.until(lambda: "closed" in rig.fleet.verifiers)
    code, sentence = await door.refusal()
    assert code is grpc.StatusCode.UNAVAILABLE and "start one with --join-port" in sentence
    await rig.verifier("open", model="another", fingerprint="other weights")
    async with door.stream() as stream:
        await stream.greeted()
        await rig.until(lambda: "laptop" in rig.fleet.drafters)

        def drafts_for(name: str) -> Any:
            return rig.fleet.choice.drafter_for(
                Wanted(rig.fleet.verifiers[name], frozenset(), lambda *_: 0.8)
            )

        assert drafts_for("closed") is None
        assert drafts_for("open") is rig.fleet.drafters["laptop"]


async def test_one_that_does_not_fit_is_told_why(rig: Any, door: Door) -> None:
    await rig.verifier()
    stranger = replace(INFO, identity=replace(INFO.identity, tokenizer_hash="other tokens"))
    async with door.stream(info=stranger) as stream:
        await stream.next()
        await stream.say(hello=stranger.identity.hello())
        code, sentence = await stream.end()
    assert code is grpc.StatusCode.FAILED_PRECONDITION and "tokenizer differs" in sentence


async def test_one_that_falls_silent_is_given_up(rig: Any, door: Door) -> None:
    verifier = await rig.verifier()
    async with door.stream() as stream:
        await stream.greeted()
        await rig.until(lambda: "laptop" in rig.fleet.drafters)
        running = Running(rig, request())
        sid = (await verifier.next_command("open")).session_id
        code, sentence = await stream.end()
        assert code is grpc.StatusCode.UNAVAILABLE and "silent for 2 seconds" in sentence
        verifier.say(**committed(sid, 3, 3), **finished(sid))
        await running.task
