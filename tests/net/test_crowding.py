"""Connections that are too many: those that say nothing go, of who has most of them, and others get in."""

from __future__ import annotations

import asyncio
import errno
import random
from collections import Counter
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.net import crowding
from outrider.net.crowding import Connection, limit_connections, too_many
from outrider.net.grpc_health import add_health
from outrider.net.rpc import bind, new_server

MOST = 16
SAYS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(
    [0, 0, 0, 4, 0, 0, 0, 0, 0]
)  # and settings: no handshake is left


def test_who_has_least_loses_nothing_and_who_says_most_is_the_last() -> None:
    rng = random.Random(1)
    for _ in range(300):
        connections = [
            Connection(number, rng.choice("aaaaaabbc"), rng.randrange(99))
            for number in range(rng.randrange(60))
        ]
        most = rng.randrange(40)
        shut = too_many(connections, most)
        left = [one for one in connections if one not in shut]
        had, has = (Counter(one.address for one in some) for some in (connections, left))
        assert len(left) <= max(most, 0) and (len(connections) > most or not shut)
        if shut:
            assert len(left) > most - len(had)  # no more than need be
            highest = max(has.values(), default=0)
            assert all(has[each] >= min(had[each], highest - 1) for each in had)
        for address in had:
            kept = [one.received for one in left if one.address == address]
            gone = [one.received for one in shut if one.address == address]
            assert max(gone, default=0) <= min(kept, default=99)


async def opened(port: int, says: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
    writer.write(says)
    return reader, writer


async def test_it_goes_on_after_a_moment_without_a_free_descriptor_or_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a moment had ended verifiers and drafters, and a router was watched no more."""
    looks: list[Any] = []

    def moved(ports: Any) -> dict[Any, Any]:
        looks.append(ports)
        if len(looks) < 3:
            raise [OSError(errno.EMFILE, "Too many open files"), RuntimeError("no thread")][len(looks) - 1]
        return {}

    monkeypatch.setattr(crowding, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(crowding, "SETTLED_LOOKS", 1)
    monkeypatch.setattr(crowding.HALVES, "explained", lambda: {("a", 1): 0.0})
    monkeypatch.setattr(crowding, "_moved", moved)
    keeping = asyncio.create_task(limit_connections({1: MOST}))
    async with asyncio.timeout(60):
        while len(looks) < 5:
            assert not keeping.done()
            await asyncio.sleep(0.001)
    keeping.cancel()


@pytest.mark.parametrize("says", [b"", SAYS], ids=["nothing", "settings"])
async def test_a_client_gets_in_whoever_holds_all_places(
    says: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.net.rpc.descriptors", lambda: 2 * MOST)
    monkeypatch.setattr(crowding, "LOOK_SECONDS", 0.01)
    server = new_server()
    add_health(server, lambda: True, "outrider.v1.Generation")
    address = bind(server, "127.0.0.1", 0)
    port = int(address.rpartition(":")[2])
    await server.start()
    keeping = asyncio.create_task(limit_connections({port: MOST}))
    early = grpc.aio.insecure_channel(address)
    watch = health_pb2_grpc.HealthStub(early).Watch(health_pb2.HealthCheckRequest())
    await watch.read()
    held = [await opened(port, says) for _ in range(2 * MOST)]
    async with asyncio.timeout(60), grpc.aio.insecure_channel(address) as late:
        request = health_pb2.HealthCheckRequest()
        await health_pb2_grpc.HealthStub(late).Check(request, wait_for_ready=True)
    assert not watch.done()
    watch.cancel()
    await early.close()
    for _, writer in held:
        writer.close()
    keeping.cancel()
    await server.stop(None)
