"""What was asked over gRPC is let go when the call is over. In a cycle it would stay until the collector's
next round, which comes after so many objects, however many bytes they hold: without a key, too."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import grpc
import pytest

from outrider.net.rpc import bind, new_server
from outrider.v1 import generation_pb2
from router.api.access import Access
from router.api.grpc_generation import add_generation_service
from router.api.intake import Intake
from router.api.keys import ApiKey, digest
from router.metrics import Metrics
from tests.router.api.scripted import ScriptedRunner, byte_level, served, steps

CONTEXT = 1024
BYTES = 10_007  # of what is asked: nothing else has so many
KEY = (("authorization", "Bearer k"),)
GENERATE = "Generate"
LATE = 4  # calls after which gRPC itself has let one go


@pytest.fixture
async def channel(metrics: Metrics) -> AsyncIterator[grpc.aio.Channel]:
    server, keys = new_server(), (ApiKey("alice", digest("k"), None, 2),)
    runner = ScriptedRunner(served(byte_level(), max_context=CONTEXT), lambda request: steps([5, 6, 7]))
    add_generation_service(
        server, Intake(runner, lambda limit: 1), metrics, Access(lambda: keys, metrics, lambda: 0.0)
    )
    channel = grpc.aio.insecure_channel(bind(server, "127.0.0.1", 0))
    await server.start()
    yield channel
    await channel.close()
    await server.stop(None)


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def written(fields: Mapping[str, Any]) -> bytes:
    return generation_pb2.GenerateRequest(**fields).SerializeToString()


async def call(channel: grpc.aio.Channel, method: str, asked: Mapping[str, Any], key: bool = True) -> str:
    """Returns the name of its status. The client keeps the fields, not the bytes."""
    path, metadata = f"/outrider.v1.Generation/{method}", KEY if key else ()
    try:
        if method == "Cancel":
            await channel.unary_unary(path, written)(asked, metadata=metadata)
        else:
            async for _ in channel.unary_stream(path, written)(asked, metadata=metadata):
                pass
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


def holders(size: int) -> list[object]:
    """Returns what holds so many bytes, of all that the collector knows."""
    return [
        one
        for one in gc.get_objects()
        if any(isinstance(part, bytes) and len(part) == size for part in gc.get_referents(one))
    ]


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    ("method", "asked", "key", "expected"),
    [
        (GENERATE, {"text": "a" * BYTES}, False, "UNAUTHENTICATED"),
        ("Resume", {"text": "a" * BYTES}, False, "UNAUTHENTICATED"),
        ("Cancel", {"text": "a" * BYTES}, False, "UNAUTHENTICATED"),
        (GENERATE, {"text": "a" * BYTES * 2}, True, "INVALID_ARGUMENT"),  # for the context
        (GENERATE, {"text": "a", "n": 3, "stop": ["a" * 1000] * 10}, True, "INVALID_ARGUMENT"),  # for the key
        ("Resume", {"text": "a" * BYTES}, True, "INVALID_ARGUMENT"),  # for what names a session
        ("Cancel", {"text": "a" * BYTES}, True, "INVALID_ARGUMENT"),
        (GENERATE, {"text": "a", "stop": ["a" * 1000] * 10}, True, "OK"),
    ],
)
async def test_nothing_holds_what_a_call_asked(
    channel: grpc.aio.Channel, method: str, asked: Mapping[str, Any], key: bool, expected: str
) -> None:
    size = len(written(asked))
    assert await call(channel, method, asked, key) == expected
    for _ in range(LATE):
        assert await call(channel, "Cancel", {}, False) == "UNAUTHENTICATED"
    found = holders(size)
    assert not found
