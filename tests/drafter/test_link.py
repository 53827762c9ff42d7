"""The stream to a verifier: what is said again when it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from drafter import link as link_module
from drafter.link import MOST_FAILURES, VerifierLink
from drafter.session import DraftSession, DraftSpec, Guess
from outrider.net.heartbeat import HEARTBEAT_SECONDS, SILENCE_SECONDS
from outrider.net.rpc import bind, new_server
from outrider.sampling.params import SamplingParams
from outrider.v1 import verifier_pb2, verifier_pb2_grpc
from outrider.wire.drafter_sessions import DraftEndCause
from outrider.wire.hello import Identity, Role, hello_to_wire
from outrider.wire.session import SessionParams
from outrider.wire.speculation import Attach, CommitBatch

TOKENS = "tokenizer hash"


class Listener(verifier_pb2_grpc.VerifierServicer):
    """Hears what a drafter says, and breaks the stream when told to."""

    def __init__(self, tokenizer_hash: str = TOKENS) -> None:
        self.heard: asyncio.Queue[tuple[int, verifier_pb2.DraftBatch]] = asyncio.Queue()
        self.streams = self.beaten = 0
        self.hang_up = asyncio.Event()
        self.rest = False
        self.beats = True  # False: it is silent
        self._tokenizer_hash = tokenizer_hash

    async def Speculate(self, request_iterator: Any, context: Any) -> AsyncIterator[verifier_pb2.CommitBatch]:
        self.streams += 1
        number = self.streams

        async def listen() -> None:
            async for batch in request_iterator:
                self.heard.put_nowait((number, batch))

        listening = asyncio.create_task(listen())
        yield verifier_pb2.CommitBatch(
            hello=hello_to_wire(Identity(Role.VERIFIER, "v", 1, "", self._tokenizer_hash).hello()),
            rest=self.rest,
        )
        while not self.hang_up.is_set():
            try:
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await self.hang_up.wait()
            except TimeoutError:
                if self.beats:
                    self.beaten += 1
                    yield verifier_pb2.CommitBatch(rest=self.rest)
        self.hang_up.clear()
        listening.cancel()


def draft_session() -> DraftSession:
    spec = DraftSpec(b"s" * 16, SessionParams((1, 2), SamplingParams(), 50), (), b"k" * 16, 100)
    return DraftSession(spec, 8)


async def started(listener: Listener) -> tuple[Any, str]:
    server = new_server()
    verifier_pb2_grpc.add_VerifierServicer_to_server(listener, server)
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    return server, address


async def until_attached(listener: Listener, stream: int) -> verifier_pb2.DraftBatch:
    async with asyncio.timeout(120):
        while True:
            number, batch = await listener.heard.get()
            if number == stream and batch.attach:
                return batch


async def test_sessions_are_attached_anew_after_the_stream_broke_while_the_drafter_had_nothing_to_say() -> (
    None
):
    listener = Listener()
    server, address = await started(listener)
    one = draft_session()
    ended: list[tuple[object, ...]] = []
    link = VerifierLink(
        address,
        Identity(Role.DRAFTER, "d", 1, "", TOKENS),
        print,
        lambda *about: ended.append(about),
        lambda: None,
        time.monotonic,
    )
    link.add(one)
    assert (await until_attached(listener, 1)).attach[0].draft_key == b"k" * 16
    for stream in range(2, 2 + MOST_FAILURES):
        listener.hang_up.set()
        batch = await until_attached(listener, stream)
        assert [attach.session_id for attach in batch.attach] == [b"s" * 16]
        assert [draft.base for draft in batch.drafts] == [2]  # and acknowledges what it knows
    one.extend(Guess(7, 0.9, 0.5, 0, 0.5))
    link.changed(one)
    async with asyncio.timeout(120):
        number, batch = await listener.heard.get()
    draft = batch.drafts[0]
    assert (number, list(draft.tokens), draft.survival) == (1 + MOST_FAILURES, [7], bytes([128]))
    listener.hang_up.set()
    batch = await until_attached(listener, 2 + MOST_FAILURES)
    assert list(batch.drafts[0].tokens) == [7]  # who answers now has not heard of it
    assert not ended  # each time it was reached
    await link.close()
    await server.stop(0)


async def test_without_sessions_the_end_of_the_stream_is_the_end_of_the_link() -> None:
    listener = Listener()
    server, address = await started(listener)
    over = asyncio.Event()
    link = VerifierLink(
        address, Identity(Role.DRAFTER, "d", 1, "", TOKENS), print, print, over.set, time.monotonic
    )
    link.add(draft_session())
    await until_attached(listener, 1)
    link.remove(b"s" * 16)
    listener.hang_up.set()
    async with asyncio.timeout(120):
        await over.wait()
    await link.close()
    await server.stop(0)


async def test_a_stream_without_sessions_is_ended_after_a_while_and_one_with_sessions_is_not() -> None:
    listener, now = Listener(), 0.0
    server, address = await started(listener)
    over = asyncio.Event()
    drafter = Identity(Role.DRAFTER, "d", 1, "", TOKENS)
    link = VerifierLink(address, drafter, print, print, over.set, lambda: now)
    link.add(draft_session())
    await until_attached(listener, 1)
    now += 2 * link_module.IDLE_SECONDS
    beaten = listener.beaten
    while listener.beaten < beaten + 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert not over.is_set()
    link.remove(b"s" * 16)
    now += link_module.IDLE_SECONDS
    async with asyncio.timeout(120):
        await over.wait()
    await link.close()
    await server.stop(0)


async def test_a_verifier_with_another_tokenizer_is_given_up_with_a_sentence() -> None:
    listener = Listener("another")
    server, address = await started(listener)
    ended: asyncio.Queue[tuple[bytes, DraftEndCause, str]] = asyncio.Queue()
    link = VerifierLink(
        address,
        Identity(Role.DRAFTER, "d", 1, "", TOKENS),
        print,
        lambda session_id, cause, reason: ended.put_nowait((session_id, cause, reason)),
        lambda: None,
        time.monotonic,
    )
    link.add(draft_session())
    async with asyncio.timeout(120):
        session_id, cause, reason = await ended.get()
    assert session_id == b"s" * 16 and "tokenizer" in reason and cause is DraftEndCause.UNREACHED
    await link.close()
    await server.stop(0)


@pytest.mark.parametrize(
    ("code", "streams", "said"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, 1, "its words"),
        (grpc.StatusCode.UNAVAILABLE, MOST_FAILURES, "does not reach"),
    ],
)
async def test_one_that_refuses_is_given_up_at_once_and_one_that_is_away_after_some_attempts(
    code: grpc.StatusCode, streams: int, said: str
) -> None:
    class Refusing(Listener):
        async def Speculate(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
            self.streams += 1
            said = [await anext(request_iterator)]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    said.append(await anext(request_iterator))
            assert [each.HasField("hello") for each in said] == [True], "it speaks before it is greeted"
            await context.abort(code, "its words")
            yield

    listener = Refusing()
    server, address = await started(listener)
    ended: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
    link = VerifierLink(
        address,
        Identity(Role.DRAFTER, "d", 1, "", TOKENS),
        print,
        lambda session_id, _, reason: (
            ended.put_nowait((listener.streams, reason)),
            link.remove(session_id),
        ),
        lambda: None,
        time.monotonic,
    )
    link.add(draft_session())
    async with asyncio.timeout(120):
        number, reason = await ended.get()
    assert number == streams and said in reason
    await link.close()
    await server.stop(0)


async def test_the_end_of_a_session_that_is_another_links_by_now_is_not_its_end() -> None:
    class Parting(Listener):
        async def Speculate(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
            async for batch in super().Speculate(request_iterator, context):
                yield batch
                claims = [
                    verifier_pb2.Attach(session_id=each * 16, draft_key=b"k" * 16) for each in (b"m", b"s")
                ]
                yield verifier_pb2.CommitBatch(revoked=claims)

    listener = Parting()
    server, address = await started(listener)
    ended: asyncio.Queue[bytes] = asyncio.Queue()
    link = VerifierLink(
        address,
        Identity(Role.DRAFTER, "d", 1, "", TOKENS),
        print,
        lambda session_id, *_: ended.put_nowait(session_id),
        lambda: None,
        time.monotonic,
    )
    link.add(draft_session())
    async with asyncio.timeout(120):
        assert await ended.get() == b"s" * 16
    await link.close()
    await server.stop(0)


class Flood(verifier_pb2_grpc.VerifierServicer):
    """A verifier that commits nothing, without end."""

    def __init__(self) -> None:
        self.streams = 0

    async def Speculate(self, request_iterator: Any, context: Any) -> AsyncIterator[verifier_pb2.CommitBatch]:
        self.streams += 1
        yield verifier_pb2.CommitBatch(
            hello=hello_to_wire(Identity(Role.VERIFIER, "v", 1, "", TOKENS).hello())
        )
        while True:
            yield verifier_pb2.CommitBatch(commits=[verifier_pb2.Commit()] * 1000)


async def test_a_verifier_that_says_more_than_it_may_is_left_alone_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "BURST_BYTES", 200_000)
    monkeypatch.setattr(link_module, "BYTES_PER_SECOND", 1.0)
    over = asyncio.Event()
    monkeypatch.setattr(link_module, "CUT_OFF_SECONDS", 0.2)
    flood, ended = Flood(), asyncio.Queue[str]()
    server, address = await started(flood)
    link = VerifierLink(
        address,
        Identity(Role.DRAFTER, "d", 1, "", TOKENS),
        lambda *commit: None,
        lambda session_id, _, reason: (link.remove(session_id), ended.put_nowait(reason)),
        over.set,
        time.monotonic,
    )
    try:
        link.add(draft_session())
        assert "the verifier is cut off for 60 seconds: it says more than" in await ended.get()
        link.add(draft_session())
        assert "is cut off" in ended.get_nowait()  # at once: its router finds another drafter, or none
        await over.wait()  # and then the next session makes a new link
        assert flood.streams == 1
    finally:
        await link.close()
        await server.stop(None)


async def test_a_right_that_is_revoked_ends_only_what_shows_it() -> None:
    """Another router may have opened the session here since, with another right."""
    ended: list[str] = []
    link = VerifierLink(
        "127.0.0.1:1",
        Identity(Role.DRAFTER, "d", 1, "", TOKENS),
        lambda *commit: None,
        lambda session_id, _, reason: ended.append(reason),
        lambda: None,
        time.monotonic,
    )
    try:
        link.add(draft_session())
        for right, ends in ((b"o" * 16, 0), (b"k" * 16, 1)):
            claim = Attach(b"s" * 16, right)
            await link._heard(CommitBatch(revoked=[claim]))
            assert len(ended) == ends
    finally:
        await link.close()


async def test_a_silent_verifier_is_connected_anew() -> None:
    listener = Listener()
    server, address = await started(listener)
    link = VerifierLink(
        address, Identity(Role.DRAFTER, "d", 1, "", TOKENS), print, print, lambda: None, time.monotonic
    )
    link.add(draft_session())
    await until_attached(listener, 1)
    async with asyncio.timeout(120):
        while listener.beaten * HEARTBEAT_SECONDS <= SILENCE_SECONDS:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert listener.streams == 1, "one that beats is not silent"
    listener.beats = False
    batch = await until_attached(listener, 2)
    assert [attach.session_id for attach in batch.attach] == [b"s" * 16]
    await link.close()
    await server.stop(0)


async def test_the_sessions_of_a_verifier_that_cannot_be_reached_are_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended: asyncio.Queue[tuple[bytes, DraftEndCause, str]] = asyncio.Queue()
    over = asyncio.Event()
    link = VerifierLink(
        "127.0.0.1:1",
        Identity(Role.DRAFTER, "d", 1, "", TOKENS),
        print,
        lambda session_id, cause, reason: (
            ended.put_nowait((session_id, cause, reason)),
            link.remove(session_id),
        ),
        over.set,
        time.monotonic,
    )
    link.add(draft_session())
    async with asyncio.timeout(120):
        session_id, cause, reason = await ended.get()
        await over.wait()
    assert session_id == b"s" * 16 and "does not reach" in reason
    assert cause is DraftEndCause.UNREACHED
    assert "no draft reaches the verifier at 127.0.0.1:1: nothing listens at 127.0.0.1:1" in caplog.text
    await link.close()


async def test_sessions_rest_for_as_long_as_their_verifier_says() -> None:
    listener = Listener()
    listener.rest = True
    server, address = await started(listener)
    identity = Identity(Role.DRAFTER, "d", 1, "", TOKENS)
    link = VerifierLink(address, identity, print, print, lambda: None, time.monotonic)
    first, second = draft_session(), draft_session()
    second.spec = replace(second.spec, session_id=b"t" * 16)
    link.add(first)
    async with asyncio.timeout(120):
        while not first.resting:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        link.add(second)
        assert second.resting and not second.wants_token
        listener.rest = False
        while first.resting or second.resting:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert first.wants_token
    await link.close()
    await server.stop(0)
