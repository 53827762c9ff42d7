"""Calls that ask nothing, or go on asking: they end, and nobody holds more than a share of the places."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from outrider.errors import Overloaded
from outrider.net import grpc_health, questions
from outrider.net.grpc_health import add_health
from outrider.net.places import Places
from outrider.net.rpc import new_server
from tests.net.connected import connected

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
LISTED = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


@asynccontextmanager
async def serving() -> AsyncIterator[grpc.aio.Channel]:
    server = new_server()
    add_health(server, lambda: True, "outrider.v1.Generation")
    async with connected(server) as connection:
        yield connection


@pytest.mark.parametrize("method", [CHECK, WATCH, REFLECTION])
async def test_a_call_that_asks_nothing_ends(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "QUESTION_SECONDS", 0.1)
    async with serving() as connection, asyncio.timeout(60):
        call = connection.stream_stream(method)()
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await call.details() == "nothing was asked in 0.1 s"
        call = connection.stream_stream(method)()
        await call.done_writing()  # without a word
        ended = grpc.StatusCode.OK if method == REFLECTION else grpc.StatusCode.INVALID_ARGUMENT
        assert await call.code() is ended


async def test_of_one_address_so_many_calls_wait_for_their_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "MOST_UNASKED", 8)
    async with serving() as connection, asyncio.timeout(60):
        calls = [connection.stream_stream(CHECK)() for _ in range(9)]
        ends = {asyncio.ensure_future(call.code()) for call in calls}
        refused = 0
        while refused < 5:
            done, ends = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            assert {end.result() for end in done} == {EXHAUSTED}
            refused += len(done)
        waiting = [call for call in calls if not call.done()]
        assert len(waiting) == 8 // questions.SHARE
        await waiting[0].write(health_pb2.HealthCheckRequest().SerializeToString())
        assert await waiting[0].read() is not grpc.aio.EOF
        assert await waiting[0].code() is grpc.StatusCode.OK
        again = connection.unary_unary(CHECK)  # its place is free
        assert await again(health_pb2.HealthCheckRequest().SerializeToString())


async def test_streams_of_reflection_are_few_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_health, "MOST_DESCRIBED", 8)
    monkeypatch.setattr(grpc_health, "DESCRIBED_SECONDS", 3.0)
    async with serving() as connection, asyncio.timeout(60):
        calls = [connection.stream_stream(REFLECTION)() for _ in range(2)]
        for call in calls:
            await call.write(LISTED)
            assert await call.read() is not grpc.aio.EOF
        third = connection.stream_stream(REFLECTION)()
        with suppress(grpc.aio.AioRpcError):  # it may be refused before its first word is sent
            await third.write(LISTED)
        assert await third.code() is EXHAUSTED
        assert await calls[0].code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await calls[0].details() == "this ends after 3 s; ask again"


def test_what_one_address_has_is_no_concern_of_the_others() -> None:
    places = Places(4, 2, "too many")
    with places.taken("a"), places.taken("a"):
        with pytest.raises(Overloaded), places.taken("a"):
            pass
        with places.taken("b"), places.taken("c"), pytest.raises(Overloaded), places.taken("d"):
            pass
        assert places.total == 2
    assert places.total == 0
