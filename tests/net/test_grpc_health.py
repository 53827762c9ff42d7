"""The standard health service, asked by many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.net.conversation import converse
from outrider.net.grpc_health import ADDRESS_SHARE, MOST_WATCHERS, add_health
from outrider.net.rpc import add_methods, channel, new_server
from outrider.wire.methods import SPECULATE
from outrider.wire.speculation import CommitBatch, Draft, DraftBatch

STATES = health_pb2.HealthCheckResponse
MOST = MOST_WATCHERS // ADDRESS_SHARE  # of one address


def looking() -> int:
    return sum("HealthServicer._look" in repr(task.get_coro()) for task in asyncio.all_tasks())


async def test_all_watchers_cost_one_look_and_one_too_many_is_refused() -> None:
    looks, ready = 0, True

    def is_ready() -> bool:
        nonlocal looks
        looks += 1
        return ready

    server = new_server()
    add_health(server, is_ready, "outrider.v1.Generation")
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(MOST)]
        assert {(await watch.read()).status for watch in watches} == {STATES.SERVING}
        for _ in range(3):
            refused = stub.Watch(health_pb2.HealthCheckRequest())
            assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        before, changes = looks, 3
        for _ in range(changes):
            ready = not ready
            expected = STATES.SERVING if ready else STATES.NOT_SERVING
            assert {(await watch.read()).status for watch in watches} == {expected}
        # Each told what it was told, and between two changes somebody looked once or twice, for all.
        assert looks - before <= changes * (MOST + 3)
        watches.pop().cancel()
        while True:  # its place is free at once, or a little later
            another = stub.Watch(health_pb2.HealthCheckRequest())
            try:
                if (first := await another.read()) is not grpc.aio.EOF:
                    break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.01)
        assert first.status is expected
        assert (
            len([task for task in asyncio.all_tasks() if "HealthServicer._look" in repr(task.get_coro())])
            == 1
        )
        for watch in [*watches, another]:
            watch.cancel()
        while looking():  # noqa: ASYNC110 (nothing tells of it)
            await asyncio.sleep(0.01)
    await server.stop(None)


async def test_nobody_asks_with_more_than_a_name() -> None:
    """Sixteen streams of reflection that asked for names of 16 MB, and took no answer, had held 1.4 GiB."""
    server = new_server()
    add_health(server, lambda: True, "outrider.v1.Generation")
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        health, described = (
            health_pb2_grpc.HealthStub(channel),
            reflection_pb2_grpc.ServerReflectionStub(channel),
        )
        for name, taken in (("a" * 4000, True), ("a" * 5000, False)):
            asked = health_pb2.HealthCheckRequest(service=name)
            question = reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)
            too_large = grpc.StatusCode.INVALID_ARGUMENT
            watch = health.Watch(asked)
            answers = described.ServerReflectionInfo(iter([question]))
            if taken:
                assert (await watch.read()).status == STATES.SERVICE_UNKNOWN
                assert (await answers.read()).HasField("error_response")
                watch.cancel()
            else:
                assert [await watch.code(), await answers.code()] == [too_large, too_large]
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await health.Check(asked)
            assert refused.value.code() is (grpc.StatusCode.NOT_FOUND if taken else too_large)
    await server.stop(None)


async def test_what_workers_tell_each_other_may_be_longer_than_a_name() -> None:
    server, told = new_server(), list[int]()

    async def speculate(batches: AsyncIterator[DraftBatch], context: object) -> AsyncIterator[CommitBatch]:
        async for batch in batches:
            told.extend(len(draft.tokens) for draft in batch.drafts)
            yield CommitBatch()

    add_methods(server, {SPECULATE: speculate})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with channel(f"127.0.0.1:{port}", None, SPECULATE.answered.max_bytes) as connection:
        stream = converse(connection, SPECULATE)
        await stream.write(DraftBatch(drafts=[Draft(b"s" * 16, 0, list(range(40_000)), [], b"")]))
        async with aclosing(stream.heard()) as heard:
            await anext(heard)
    assert told == [40_000]
    await server.stop(None)
