"""Two routers around one Redis, all real processes: what one of them streamed, the other goes on with."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.store.redis import RedisStore
from outrider.store.url import parse_store_url
from outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.e2e.conftest import Alone
from tests.e2e.test_serve import SAMPLINGS, Case, cases
from tests.e2e.two_routers import END_SECONDS, Service

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

MAX_TOKENS = 300
ENOUGH = 30  # tokens of every stream before something happens to its router


@dataclass
class Stream:
    """What a client has of one answer."""

    case: Case
    id: str = ""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    completed: generation_pb2.Completed | None = None
    broke: grpc.StatusCode | None = None

    async def read(self, responses: Any, on_tokens: Callable[[], Awaitable[None]] | None = None) -> None:
        try:
            async for response in responses:
                match response.WhichOneof("event"):
                    case "started":
                        assert self.id in ("", response.started.id)
                        self.id = response.started.id
                    case "delta":
                        self.tokens += response.delta.token_ids
                        self.text += response.delta.text
                    case "completed":
                        self.completed = response.completed
                if on_tokens is not None:
                    await on_tokens()
        except grpc.aio.AioRpcError as error:
            self.broke = error.code()


def asked(case: Case, max_tokens: int = MAX_TOKENS) -> generation_pb2.GenerateRequest:
    sampling = case.sampling
    return generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=case.prompt),
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        ignore_eos=True,
    )


@asynccontextmanager
async def stubs(service: Service) -> AsyncIterator[list[Any]]:
    await asyncio.to_thread(service.revive)
    channels = [grpc.aio.insecure_channel(router.grpc_address) for router in service.routers]
    made = [generation_pb2_grpc.GenerationStub(channel) for channel in channels]
    try:
        for stub in made:
            await until_served(stub)
        yield made
    finally:
        for channel in channels:
            await channel.close()


async def until_served(stub: Any) -> None:
    """Until the router has the verifier."""
    while True:
        probe = Stream(cases(1)[0])
        await probe.read(stub.Generate(asked(probe.case, max_tokens=1)))
        if probe.completed is not None:
            return
        assert probe.broke is grpc.StatusCode.UNAVAILABLE
        await asyncio.sleep(0.1)


async def begin_all(stub: Any, streams: list[Stream], act: Callable[[], Any]) -> None:
    """Reads them all side by side; does it once each has enough, and returns when all streams have ended."""
    done = False

    async def on_tokens() -> None:
        nonlocal done
        if not done and all(len(stream.tokens) >= ENOUGH for stream in streams):
            done = True
            found = act()
            if asyncio.iscoroutine(found):
                await found

    await asyncio.gather(*(stream.read(stub.Generate(asked(stream.case)), on_tokens) for stream in streams))
    assert done


async def resume_all(stub: Any, streams: list[Stream]) -> None:
    await asyncio.gather(
        *(
            stream.read(stub.Resume(generation_pb2.ResumeRequest(id=stream.id, after=len(stream.tokens))))
            for stream in streams
        )
    )


def check(streams: list[Stream], alone: Alone) -> None:
    for stream in streams:
        assert stream.tokens == alone.tokens(stream.case.prompt, stream.case.sampling, MAX_TOKENS)
        assert stream.completed is not None
        usage, drafts = stream.completed.usage, stream.completed.speculative_decoding
        assert usage.completion_tokens == MAX_TOKENS
        assert sum(drafts.acceptance_histogram) == drafts.num_spec_steps
        assert drafts.num_accepted_draft_tokens <= drafts.num_draft_tokens
    if len(streams) == len(SAMPLINGS):  # of all kinds
        # For how many of them something is drafted follows from what drafts bring on this machine just now:
        # for drawn text a look-up may find nothing, and a busy model comes too late.
        assert any(
            stream.completed and stream.completed.speculative_decoding.num_spec_steps for stream in streams
        )


def streams_of_all_kinds() -> list[Stream]:
    return [Stream(case) for case in cases(len(SAMPLINGS))]


async def test_what_a_killed_router_streamed_goes_on_at_the_other(service: Service, alone: Alone) -> None:
    streams = streams_of_all_kinds()
    killed = service.routers[0]
    async with stubs(service) as (dying, other):
        await begin_all(dying, streams, lambda: killed.process.send_signal(signal.SIGKILL))
        killed.process.wait(END_SECONDS)
        cut_off = [stream for stream in streams if stream.completed is None]
        assert cut_off and {stream.broke for stream in cut_off} == {grpc.StatusCode.UNAVAILABLE}
        await resume_all(other, streams)
        check(streams, alone)
        # The log has all of it: it is told again from the beginning, with the same text.
        again = [Stream(stream.case, stream.id) for stream in streams]
        await resume_all(other, again)
        check(again, alone)
        assert [stream.text for stream in again] == [stream.text for stream in streams]


async def test_whoever_was_told_an_id_can_resume(service: Service, alone: Alone) -> None:
    """Though the router is killed as soon as the first of them was, and nothing was generated."""
    streams = streams_of_all_kinds()
    killed = service.routers[0]
    async with stubs(service) as (dying, other):

        async def kill() -> None:
            killed.process.send_signal(signal.SIGKILL)

        await asyncio.gather(*(stream.read(dying.Generate(asked(stream.case)), kill) for stream in streams))
        killed.process.wait(END_SECONDS)
        told = [stream for stream in streams if stream.id]
        assert told and all(stream.completed is None for stream in told)
        await resume_all(other, told)
        check(told, alone)


async def test_a_stream_goes_to_the_other_router_and_back_while_both_live(
    service: Service, alone: Alone
) -> None:
    """Only the client lost its connection: both routers have the session, and one of them the log."""
    streams = streams_of_all_kinds()
    copies = [Stream(stream.case) for stream in streams]
    async with stubs(service) as (one, other):

        def move() -> None:
            for copy, stream in zip(copies, streams, strict=True):
                copy.id, copy.tokens = stream.id, list(stream.tokens)

        async def takes_over() -> None:
            move()
            asyncio.get_running_loop().call_soon(moved.set)

        moved = asyncio.Event()
        former = asyncio.create_task(begin_all(one, streams, takes_over))
        await moved.wait()
        await resume_all(other, copies)
        await former
        check(copies, alone)
        for stream in streams:
            # It ended superseded, or had come to its end just before.
            assert stream.broke is grpc.StatusCode.ABORTED or stream.completed is not None
            whole = alone.tokens(stream.case.prompt, stream.case.sampling, MAX_TOKENS)
            assert stream.tokens == whole[: len(stream.tokens)]
        assert any(stream.broke is grpc.StatusCode.ABORTED for stream in streams)
        await resume_all(one, streams)  # and back
        check(streams, alone)


@dataclass
class Both:
    """What a client has of two answers to a prompt."""

    id: str = ""
    texts: list[str] = field(default_factory=lambda: ["", ""])
    tokens: list[int] = field(default_factory=lambda: [0, 0])
    reasons: dict[int, int] = field(default_factory=dict)

    async def read(self, call: Any, enough: Callable[[], bool] = lambda: False) -> None:
        async for response in call:
            if response.HasField("started"):
                self.id = response.started.id
            elif response.HasField("delta"):
                self.texts[response.delta.index] += response.delta.text
                self.tokens[response.delta.index] += len(response.delta.token_ids)
            else:
                self.reasons[response.completed.index] = response.completed.finish_reason
            if enough():
                return


async def test_of_two_answers_one_may_be_over_before_redis_loses_its_memory(service: Service) -> None:
    """Nothing more is written of that one, and yet both are resumed together."""
    # The other goes on for a second at least: over before Redis is gone, it would be nowhere.
    request = asked(Case(cases(1)[0].prompt, SAMPLINGS[1]), 3 * MAX_TOKENS)
    request.n, request.temperature = 2, 1.0
    async with stubs(service) as (one, other):
        whole = Both()
        await whole.read(one.Generate(request))
        ends = next(  # of the first answer alone
            part
            for start in range(20, len(whole.texts[0]))
            if (part := whole.texts[0][start : start + 12]) not in whole.texts[1]
            and whole.texts[0].index(part) == start
        )
        request.stop.append(ends)
        expected = [whole.texts[0].partition(ends)[0], whole.texts[1]]
        got = Both()
        call = one.Generate(request)
        await got.read(call, lambda: 0 in got.reasons and 1 not in got.reasons)
        service.redis.kill()
        service.redis.start()
        store = RedisStore(parse_store_url(service.redis.url))
        async with asyncio.timeout(END_SECONDS):
            while len(await store._redis.keys("outrider:session:*")) < 2:  # noqa: ASYNC110 (a Redis tells nobody)
                await asyncio.sleep(0.05)
        await store.close()
        call.cancel()
        again = Both(got.id, got.texts, got.tokens, got.reasons)
        await again.read(other.Resume(generation_pb2.ResumeRequest(id=got.id, each_after=got.tokens)))
        assert again.texts == expected and set(again.reasons) == {0, 1}
