"""What a drafter refuses to draft for, and which opening of a session a command is for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

from drafter.service import DrafterService, RouterPeer
from drafter.session import DraftSpec
from drafter.suffix import suffix_source
from outrider.errors import MAX_MESSAGE
from outrider.net.rpc import bind, new_server
from outrider.sampling.params import SamplingParams
from outrider.wire.description import ModelInfo, TokenizerFiles, WorkerInfo
from outrider.wire.drafter_sessions import (
    MAX_EVENTS_BYTES,
    MOST_ENDED,
    CloseDraft,
    DraftEndCause,
    DraftEnded,
    DrafterCommand,
    DrafterEvents,
    OpenDraft,
    ReachVerifier,
    SetWindow,
)
from outrider.wire.hello import Identity, Role
from outrider.wire.load import DrafterLoad
from outrider.wire.methods import DRAFTER_SESSIONS
from outrider.wire.session import SessionId, SessionParams

MODEL = ModelInfo("draft", "", "LlamaForCausalLM", 1, 100, 64, (0,), "cpu", "float32", True)
FITS = DraftSpec(b"s" * 16, SessionParams((1, 2), SamplingParams(), 8), (), b"k" * 16, 100)


def test_a_session_that_cannot_be_drafted_for_is_refused_by_a_sentence() -> None:
    service = DrafterService(
        WorkerInfo(Identity(Role.DRAFTER, "d", 1, "", "t"), MODEL, 3, 16), TokenizerFiles("t", "{}", "")
    )
    assert service._unfit(FITS) is None
    for change, sentence in (
        ({"session_id": b"s"}, "session_id must be 16 bytes, not 1"),
        ({"target_vocab_size": 0}, "target_vocab_size must be at least 1"),  # nothing could be drawn
        ({"params": replace(FITS.params, max_tokens=63)}, "the draft's context has 64"),
        ({"params": replace(FITS.params, max_tokens=47)}, "the drafter's KV pool holds 48"),
        ({"output": (100,)}, "no token ids above 99"),
        ({"params": replace(FITS.params, prompt=())}, "prompt must hold"),
        ({"output": (1,) * 8}, "more than the 8 tokens of output"),
        ({"params": replace(FITS.params, sampling=SamplingParams(temperature=-1))}, "temperature must be in"),
    ):
        assert sentence in str(service._unfit(replace(FITS, **change)))


async def test_what_is_no_verifiers_address_is_handed_to_nobody() -> None:
    """gRPC would take it for a file, or ask a name server of somebody's choice."""
    found = suffix_source()
    service = DrafterService(found.info, found.tokenizer)
    service.use(found.proposer(service.on_change, service.on_failed))
    peer, addresses = RouterPeer(), ("unix:/tmp/x", "dns://1.2.3.4/v:1", "", "v", "v:0", "v:70000")

    async def commands() -> AsyncIterator[DrafterCommand]:
        for number, address in enumerate(addresses):
            session_id = SessionId(bytes([number]) * 16)
            asked = OpenDraft(session_id, FITS.params, (), address, b"k" * 16, 3, 100, 1)
            yield DrafterCommand(command=asked)
        yield DrafterCommand(command=ReachVerifier("unix:/tmp/x"))

    await service._obey(peer, commands())
    assert [end.reason for end in peer.ended] == ["verifier_address must be a host:port"] * len(addresses)
    assert not service._links and "that is no host:port" in await service.trouble()
    await service.close()


async def test_a_command_for_a_former_opening_does_not_reach_the_one_after_it() -> None:
    found = suffix_source()
    service = DrafterService(found.info, found.tokenizer)
    service.use(found.proposer(service.on_change, service.on_failed))

    def opened(number: int) -> OpenDraft:
        return OpenDraft(FITS.session_id, FITS.params, (), "127.0.0.1:1", b"k" * 16, 3, 100, number)

    async def commands() -> AsyncIterator[DrafterCommand]:
        for command in (
            *(opened(1), CloseDraft(FITS.session_id, 1), opened(2)),
            *(SetWindow(FITS.session_id, 1, 9), CloseDraft(FITS.session_id, 1)),
        ):
            yield DrafterCommand(command=command)

    await service._obey(RouterPeer(), commands())
    session = service._link_of[FITS.session_id]._sessions[FITS.session_id]
    assert session.window == 3
    await service.close()


async def test_many_sessions_that_end_at_once_are_told_in_messages_that_a_router_takes() -> None:
    found = suffix_source()
    service = DrafterService(found.info, found.tokenizer)
    service.use(found.proposer(service.on_change, service.on_failed))
    count = 2 * MOST_ENDED + 1

    async def messages() -> AsyncIterator[DrafterCommand]:
        yield DrafterCommand(Identity(Role.ROUTER, "r", 1).hello())
        for number in range(count):
            session_id = number.to_bytes(16)  # whose target has no tokens: it is refused
            yield DrafterCommand(
                command=OpenDraft(session_id, FITS.params, (), "127.0.0.1:1", b"k" * 16, 3, 0, 1)
            )
        await asyncio.Event().wait()

    told: list[DraftEnded] = []
    async with aclosing(service.sessions(messages(), None)) as events:
        while len(told) < count:
            ended = list((await anext(events)).ended)
            assert len(ended) <= MOST_ENDED
            told += ended
    assert [int.from_bytes(one.session_id) for one in told] == list(range(count))
    longest = [DraftEnded(b"s" * 16, DraftEndCause.FAILED, "x" * MAX_MESSAGE, 2**40)] * MOST_ENDED
    trips = {f"{number}.outrider.pod.cluster.local:50051": 0.1 for number in range(1000)}
    events_bytes = DRAFTER_SESSIONS.answered.to_bytes(
        DrafterEvents(None, longest, DrafterLoad(round_trips=trips))
    )
    assert len(events_bytes) <= MAX_EVENTS_BYTES
    await service.close()


async def test_it_finds_out_if_it_reaches_a_verifier() -> None:
    found = suffix_source()
    service = DrafterService(found.info, found.tokenizer)
    service.use(found.proposer(service.on_change, service.on_failed))
    assert await service.trouble() == ""
    server = new_server()
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    answers: asyncio.Queue[str] = asyncio.Queue()

    async def messages() -> AsyncIterator[DrafterCommand]:
        yield DrafterCommand(Identity(Role.ROUTER, "r", 1).hello())
        yield DrafterCommand(command=ReachVerifier(address))
        assert await answers.get() == "" == await service.trouble()
        await server.stop(0)
        yield DrafterCommand(command=ReachVerifier(address))
        await asyncio.Event().wait()

    async with aclosing(service.sessions(messages(), None)) as events:
        async for batch in events:
            if batch.reached is not None:
                answers.put_nowait(batch.reached)
            if batch.reached:
                break
    why = f"the verifier at {address}: nothing listens at {address}"
    assert batch.reached == f"the drafter does not reach {why}"
    assert await service.trouble() == f"no draft of it reaches {why}"
    await service.close()
