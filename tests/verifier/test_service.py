"""The verifier's streams, spoken to by hand: who is let in, and what becomes of what they say."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from outrider.engine.loading import load_engine, load_tokenizer
from outrider.engine.scheduler import Limits
from outrider.rpc import Identity, Role, bind, channel, new_server
from outrider.sampling.params import SamplingParams
from outrider.v1 import common_pb2, verifier_pb2, verifier_pb2_grpc
from outrider.wire.codec import sampling_to_wire
from outrider.wire.description import WorkerInfo
from tests.tiny_models import build
from verifier.service import VerifierService
from verifier.stepper import Stepper

KEY = b"k" * 16
GREEDY = sampling_to_wire(SamplingParams(temperature=0.0))


@dataclass
class Running:
    service: VerifierService
    stepper: Stepper
    stub: verifier_pb2_grpc.VerifierStub
    identity: Identity


@dataclass
class Talk:
    """A bidirectional call, one side written by hand."""

    call: Any
    outgoing: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)

    @classmethod
    def start(cls, method: Any) -> Talk:
        outgoing: asyncio.Queue[Any] = asyncio.Queue()

        async def messages() -> AsyncIterator[Any]:
            while (message := await outgoing.get()) is not None:
                yield message

        return cls(method(messages()), outgoing)

    def say(self, message: Any) -> None:
        self.outgoing.put_nowait(message)

    async def hear(self) -> Any:
        async with asyncio.timeout(20):
            message = await self.call.read()
        assert message is not grpc.aio.EOF, "the stream ended"
        return message


@pytest.fixture
async def verifier(tmp_path: Path) -> AsyncIterator[Running]:
    folder = str(build("llama", tmp_path / "target"))
    engine, tokenizer = load_engine(folder, threads=1, kv_memory_bytes=2**24), load_tokenizer(folder)
    identity = Identity(Role.VERIFIER, "v", 1, engine.info.fingerprint, tokenizer.hash)
    service = VerifierService(WorkerInfo(identity, engine.info, engine.pool.num_blocks, 16), tokenizer)
    stepper = Stepper(engine, Limits(), service.on_step, time.monotonic)
    service.use(stepper)
    server = new_server()
    verifier_pb2_grpc.add_VerifierServicer_to_server(service, server)
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    steps = asyncio.create_task(stepper.run())
    async with channel(address) as connection:
        yield Running(service, stepper, verifier_pb2_grpc.VerifierStub(connection), identity)
    steps.cancel()
    await server.stop(0)


def hello(role: Role, tokenizer_hash: str = "", version: int = 1) -> common_pb2.Hello:
    message = Identity(role, "peer", 2, "", tokenizer_hash).hello()
    message.protocol_version = version
    return message


async def router(verifier: Running) -> Talk:
    talk = Talk.start(verifier.stub.Sessions)
    talk.say(verifier_pb2.VerifierCommand(hello=hello(Role.ROUTER)))
    assert (await talk.hear()).hello.worker_id == "v"
    return talk


async def drafter(verifier: Running) -> Talk:
    talk = Talk.start(verifier.stub.Speculate)
    talk.say(verifier_pb2.DraftBatch(hello=hello(Role.DRAFTER, verifier.identity.tokenizer_hash)))
    assert (await talk.hear()).hello.worker_id == "v"
    return talk


def open_session(session_id: bytes, max_tokens: int = 4, **changed: Any) -> verifier_pb2.VerifierCommand:
    fields = {
        "prompt": [5, 6, 7],
        "sampling": GREEDY,
        "num_speculative_tokens": 4,
        "draft_key": KEY,
        **changed,
    }
    return verifier_pb2.VerifierCommand(
        open=verifier_pb2.OpenSession(session_id=session_id, max_tokens=max_tokens, **fields)
    )


def attach(session_id: bytes, key: bytes = KEY) -> verifier_pb2.DraftBatch:
    return verifier_pb2.DraftBatch(attach=[verifier_pb2.Attach(session_id=session_id, draft_key=key)])


async def output(talk: Talk, session_id: bytes) -> list[int]:
    """The tokens of a session from now to its end."""
    tokens: list[int] = []
    base = None
    while True:
        events = await talk.hear()
        for step in events.committed:
            if step.session_id == session_id:
                base = step.base if base is None else base
                assert step.base == base + len(tokens)
                tokens += step.tokens
        if any(end.session_id == session_id for end in events.finished):
            return tokens


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (verifier_pb2.DraftBatch(), "hello"),
        (verifier_pb2.DraftBatch(hello=hello(Role.ROUTER)), "drafter"),
        (verifier_pb2.DraftBatch(hello=hello(Role.DRAFTER, version=9)), "version 9"),
        (verifier_pb2.DraftBatch(hello=hello(Role.DRAFTER, "another")), "tokenizer"),
    ],
)
async def test_a_stranger_is_refused_with_a_sentence(verifier: Running, first: Any, said: str) -> None:
    talk = Talk.start(verifier.stub.Speculate)
    talk.say(first)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await talk.hear()
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert said in refused.value.details()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [5, 199]}, "198"),
        ({"prompt": [5] * 1000, "max_tokens": 100}, "1024"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"sampling": sampling_to_wire(SamplingParams(top_p=2.0))}, "top_p"),
        ({"session_id": b"short"}, "session_id"),
    ],
)
async def test_a_session_that_cannot_run_fails_alone(
    verifier: Running, changed: dict[str, Any], said: str
) -> None:
    talk = await router(verifier)
    talk.say(open_session(**{"session_id": b"b" * 16, **changed}))
    talk.say(open_session(b"g" * 16))
    failed = (await talk.hear()).failed[0]
    assert failed.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert said in failed.message
    assert len(await output(talk, b"g" * 16)) == 4


async def test_an_attachment_may_come_before_its_session(verifier: Running) -> None:
    drafting, talk = await drafter(verifier), await router(verifier)
    drafting.say(attach(b"s" * 16))
    talk.say(open_session(b"t" * 16))
    plain = await output(talk, b"t" * 16)  # the attachment has been read by now
    talk.say(open_session(b"s" * 16))
    assert await output(talk, b"s" * 16) == plain
    committed: list[int] = []
    while True:
        batch = await drafting.hear()
        for commit in batch.commits:
            assert commit.base == 3  # nothing has been acknowledged since
            committed = list(commit.tokens)
        if list(batch.ended) == [b"s" * 16]:
            break
    assert committed == plain[: len(committed)]


async def test_only_who_has_the_key_may_draft(verifier: Running) -> None:
    drafting, talk = await drafter(verifier), await router(verifier)
    talk.say(open_session(b"s" * 16, max_tokens=500))
    await talk.hear()
    drafting.say(attach(b"s" * 16, b"wrong"))
    assert list((await drafting.hear()).ended) == [b"s" * 16]
    drafting.say(
        verifier_pb2.DraftBatch(drafts=[verifier_pb2.Draft(session_id=b"s" * 16, base=3, tokens=[1])])
    )
    await output(talk, b"s" * 16)
    assert verifier.service.dropped["wrong_key"] == 1
    assert verifier.service.dropped["not_attached"] == 1


@pytest.mark.parametrize(
    "claim",
    [
        verifier_pb2.Attach(session_id=b"short", draft_key=KEY),
        verifier_pb2.Attach(session_id=b"s" * 16, draft_key=b"k" * 1000),
    ],
)
async def test_a_claim_of_the_wrong_size_is_dropped(verifier: Running, claim: verifier_pb2.Attach) -> None:
    drafting, talk = await drafter(verifier), await router(verifier)
    drafting.say(verifier_pb2.DraftBatch(attach=[claim]))
    talk.say(open_session(b"t" * 16))
    await output(talk, b"t" * 16)
    assert verifier.service.dropped["bad_attach"] == 1


async def test_a_session_without_a_key_has_no_drafter(verifier: Running) -> None:
    drafting, talk = await drafter(verifier), await router(verifier)
    drafting.say(attach(b"s" * 16, b""))
    talk.say(open_session(b"s" * 16, draft_key=b""))
    assert list((await drafting.hear()).ended) == [b"s" * 16]
    await output(talk, b"s" * 16)


async def test_a_router_that_goes_takes_its_sessions_with_it(verifier: Running) -> None:
    talk = await router(verifier)
    talk.say(open_session(b"s" * 16, max_tokens=1000))
    await talk.hear()
    talk.call.cancel()
    async with asyncio.timeout(20):
        while verifier.stepper.load.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert verifier.stepper.load.kv_usage == 0


async def test_a_closed_session_frees_its_blocks_and_the_router_hears_the_load(verifier: Running) -> None:
    talk = await router(verifier)
    talk.say(open_session(b"s" * 16, max_tokens=1000))
    await talk.hear()
    talk.say(verifier_pb2.VerifierCommand(close=verifier_pb2.CloseSession(session_id=b"s" * 16)))
    while (await talk.hear()).load.kv_usage > 0:
        pass


async def test_the_round_trip_can_be_measured(verifier: Running) -> None:
    drafting, talk = await drafter(verifier), await router(verifier)
    drafting.say(verifier_pb2.DraftBatch(stamp_us=77, attach=attach(b"s" * 16).attach))
    talk.say(open_session(b"s" * 16))
    batch = await drafting.hear()
    assert batch.echo_us == 77


async def test_another_router_may_cancel_a_session_and_its_own_hears_of_it(verifier: Running) -> None:
    owner, other = await router(verifier), await router(verifier)
    owner.say(open_session(b"s" * 16, max_tokens=1000))
    assert (await owner.hear()).committed
    other.say(verifier_pb2.VerifierCommand(cancel=verifier_pb2.CloseSession(session_id=b"s" * 16)))
    failed = await failure(owner)
    assert (failed.session_id, failed.code) == (b"s" * 16, grpc.StatusCode.CANCELLED.value[0])
    assert verifier.stepper.load.running == 0 and verifier.stepper.load.kv_usage == 0


async def test_draining_finishes_what_is_there_and_takes_nothing_new(verifier: Running) -> None:
    talk = await router(verifier)
    talk.say(open_session(b"s" * 16, max_tokens=200))
    assert (await talk.hear()).committed
    verifier.service.drain()
    talk.say(open_session(b"t" * 16))
    refused = await failure(talk)
    assert (refused.session_id, refused.code) == (b"t" * 16, grpc.StatusCode.UNAVAILABLE.value[0])
    idle = asyncio.create_task(verifier.service.until_idle())
    await output(talk, b"s" * 16)
    assert not idle.done()  # who hears that the verifier leaves hangs up: the end has to be there before
    await idle
    assert verifier.service.load().draining


async def test_what_is_given_back_can_go_on_elsewhere(verifier: Running) -> None:
    talk = await router(verifier)
    talk.say(open_session(b"s" * 16, max_tokens=1000))
    assert (await talk.hear()).committed
    verifier.service.drain()
    verifier.service.give_back()
    given = await failure(talk)
    assert (given.session_id, given.code) == (b"s" * 16, grpc.StatusCode.UNAVAILABLE.value[0])
    async with asyncio.timeout(20):
        await verifier.service.until_idle()
    assert verifier.stepper.load.kv_usage == 0


async def test_a_session_that_comes_back_may_be_drafted_for_again(verifier: Running) -> None:
    drafting, talk = await drafter(verifier), await router(verifier)
    talk.say(open_session(b"s" * 16, max_tokens=3))
    tokens = await output(talk, b"s" * 16)
    talk.say(open_session(b"s" * 16, max_tokens=500, output=tokens))
    assert (await talk.hear()).committed
    drafting.say(attach(b"s" * 16))
    batch = await drafting.hear()
    assert batch.commits[0].base == 3 + len(tokens) and not batch.ended


async def test_of_a_session_that_goes_on_elsewhere_the_drafter_hears_from_its_router_alone(
    verifier: Running,
) -> None:
    """It may have been told to draft for it at another verifier already, and would give that up."""
    drafting, talk = await drafter(verifier), await router(verifier)
    talk.say(open_session(b"s" * 16, max_tokens=1000))
    assert (await talk.hear()).committed
    drafting.say(attach(b"s" * 16))
    assert (await drafting.hear()).commits
    verifier.service.give_back()
    await failure(talk)
    drafting.say(
        verifier_pb2.DraftBatch(
            attach=attach(b"s" * 16).attach,  # again, before the router has opened it again
            drafts=[verifier_pb2.Draft(session_id=b"s" * 16, base=4, tokens=[1])],
        )
    )
    talk.say(open_session(b"t" * 16))
    await output(talk, b"t" * 16)  # that has been read by now
    talk.say(open_session(b"s" * 16, max_tokens=900))
    assert (await talk.hear()).committed
    running = verifier.stepper.get(b"s" * 16)
    assert running is not None and running.pace is not None  # its claim stands
    for _ in range(3):
        assert not (await drafting.hear()).ended


async def test_a_router_may_be_back_before_the_end_of_its_former_stream_is_seen(verifier: Running) -> None:
    former, talk = await router(verifier), await router(verifier)
    former.say(open_session(b"s" * 16, max_tokens=1000))
    assert (await former.hear()).committed
    talk.say(open_session(b"s" * 16, max_tokens=500))
    while not (events := await talk.hear()).committed:
        assert not events.failed
    former.call.cancel()
    first = events.committed[0]
    assert first.base == 3
    assert len(await output(talk, b"s" * 16)) == 500 - len(first.tokens)
    assert verifier.stepper.load.running == 0


async def test_a_step_that_fails_ends_what_it_ran_and_not_what_was_opened_anew_meanwhile(
    verifier: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    former, talk = await router(verifier), await router(verifier)
    engine = verifier.stepper._engine
    choose, running, go_on = engine.choose, threading.Event(), threading.Event()

    def fail_once(*work: Any) -> list[int]:
        monkeypatch.setattr(engine, "choose", choose)
        running.set()
        go_on.wait()
        raise RuntimeError("a mistake")

    monkeypatch.setattr(engine, "choose", fail_once)
    former.say(open_session(b"s" * 16))
    await asyncio.to_thread(running.wait)
    before = verifier.stepper.get(b"s" * 16)
    talk.say(open_session(b"s" * 16))
    while verifier.stepper.get(b"s" * 16) is before:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    go_on.set()
    assert len(await output(talk, b"s" * 16)) == 4


async def test_a_session_that_was_cancelled_on_its_way_here_does_not_begin(verifier: Running) -> None:
    talk, other = await router(verifier), await router(verifier)
    other.say(verifier_pb2.VerifierCommand(cancel=verifier_pb2.CloseSession(session_id=b"s" * 16)))
    other.say(open_session(b"t" * 16))
    await output(other, b"t" * 16)  # the cancel has been read by now
    talk.say(open_session(b"s" * 16, max_tokens=1000))
    failed = await failure(talk)
    assert (failed.session_id, failed.code) == (b"s" * 16, grpc.StatusCode.CANCELLED.value[0])
    assert verifier.stepper.load.running == 0


async def test_a_router_that_comes_hears_at_once_that_the_verifier_drains(verifier: Running) -> None:
    verifier.service.drain()
    talk = Talk.start(verifier.stub.Sessions)
    talk.say(verifier_pb2.VerifierCommand(hello=hello(Role.ROUTER)))
    assert (await talk.hear()).load.draining
    talk.say(open_session(b"s" * 16))
    assert (await talk.hear()).load.draining


async def test_steps_without_a_draft_are_counted_as_starvation(verifier: Running) -> None:
    talk = await router(verifier)
    talk.say(open_session(b"s" * 16, max_tokens=30, num_speculative_tokens=0))
    await output(talk, b"s" * 16)
    assert verifier.service.stats()["draft_starvation"] == 0
    talk.say(open_session(b"t" * 16, max_tokens=30))
    await output(talk, b"t" * 16)
    assert verifier.service.stats()["draft_starvation"] > 0.5


async def failure(talk: Talk) -> verifier_pb2.Failed:
    while not (events := await talk.hear()).failed:
        pass
    return events.failed[0]
