"""Messages that do not come to their end: what lies here of them is bounded, whoever sends it."""

from __future__ import annotations

import asyncio
import random
import struct
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.net import crowding, half_said
from outrider.net.crowding import limit_connections
from outrider.net.grpc_health import add_health
from outrider.net.half_said import FREE_BYTES, Halves, Held, peer_of, too_much
from outrider.net.rpc import add_methods, ask, bind, channel, new_server
from outrider.wire.description import TokenizerFiles
from outrider.wire.hello import Role
from outrider.wire.methods import GET_TOKENIZER
from tests.net.http2 import DATA, HEAD_ENDS, HEADERS, PING, call_head, connected, frame

PEER, NAME = "ipv4:192.0.2.1:7", ("192.0.2.1", 7)
HALF = 40_000  # bytes of a message of which more never come


def test_of_who_holds_most_the_largest_go_and_no_more_than_need_be() -> None:
    rng = random.Random(1)
    for _ in range(300):
        held = [Held(number, rng.choice("aaab"), rng.randrange(100)) for number in range(rng.randrange(20))]
        most = rng.randrange(500)
        shut = too_much(held, most)
        left = [one for one in held if one not in shut]
        assert sum(one.bytes for one in left) <= most or not left
        if shut:
            assert sum(one.bytes for one in left) + shut[-1].bytes > most
            sums = Counter[str]()
            for one in [*left, shut[-1]]:
                sums[one.address] += one.bytes
            assert sums[shut[-1].address] == max(sums.values())
            assert shut[-1].bytes >= max(
                (one.bytes for one in left if one.address == shut[-1].address), default=0
            )


def test_what_was_said_to_its_end_is_not_held_however_much_it_is() -> None:
    halves = Halves(lambda: 0.0)
    with halves.call(PEER) as said:
        for _ in range(1000):
            said.message(2**20)
        assert halves.held(NAME, 1000 * 2**20 + 1000 * 300, 1000) == 0
        halves.wrote(NAME, 1000)
        assert halves.held(NAME, 1015 * 2**20, 1000) > 2**20
    assert (
        halves.held(NAME, 1015 * 2**20, 1000) == 0
    )  # the call is over, and with it what came of its message
    with halves.call(PEER):
        assert 2**23 < halves.held(NAME, 1025 * 2**20, 1000) < 10 * 2**20


def test_what_was_written_is_held_until_it_goes() -> None:
    halves = Halves(lambda: 0.0)
    with halves.call(PEER):
        halves.wrote(NAME, 2**22)
    assert halves.held(NAME, 100, 2**20) == 3 * 2**20
    assert halves.held(NAME, 100, 2**22 + 100) == 0


def test_who_has_not_called_has_said_nothing_else() -> None:
    assert Halves().held(NAME, FREE_BYTES + 5, 0) == 5


@pytest.mark.parametrize("peer", ["ipv6:%5B2001:db8::1%5D:50051", "ipv6:[2001:db8::1]:50051"])
def test_a_connection_has_the_name_that_the_system_gives_it(peer: str) -> None:
    assert peer_of(peer) == ("2001:db8::1", 50051)
    assert peer_of(PEER) == NAME


async def _until_shut(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heard: Counter[int]
) -> None:
    """Answers pings, as whoever lives does. Counts the frames that it hears, by kind."""
    with suppress(OSError, asyncio.IncompleteReadError):
        while head := await reader.readexactly(9):
            payload = await reader.readexactly(int.from_bytes(head[:3]))
            heard[head[3]] += 1
            if head[3] == PING and not head[4]:
                writer.write(frame(PING, 0, payload, flags=1))
    writer.close()


async def _connected(port: int) -> tuple[asyncio.Task[None], asyncio.StreamWriter, Counter[int]]:
    reader, writer = await connected(port)
    heard = Counter[int]()
    return asyncio.create_task(_until_shut(reader, writer, heard)), writer, heard


async def _say(
    writer: asyncio.StreamWriter, path: str, said: bytes, calls: Iterable[int], end: int = 0
) -> None:
    """Says that in each of these calls, as HTTP/2 has them."""
    for number in calls:
        stream = 2 * number + 1
        writer.write(frame(HEADERS, stream, call_head(path), HEAD_ENDS))
        for start in range(0, len(said), 2**14):
            writer.write(frame(DATA, stream, said[start : start + 2**14], flags=end))
    await writer.drain()


async def _calls(port: int, path: str, said: bytes, count: int = 1, end: int = 0) -> asyncio.Task[None]:
    """Says that in so many calls, and takes nothing."""
    until_shut, writer, _ = await _connected(port)
    await _say(writer, path, said, range(count), end)
    return until_shut


CHECK, FIRST_HALF = "/grpc.health.v1.Health/Check", struct.pack(">BI", 0, 2 * HALF) + bytes(HALF - 5)


async def _half(port: int) -> asyncio.Task[None]:
    """Says the first bytes of a message to the health service."""
    return await _calls(port, CHECK, FIRST_HALF)


@asynccontextmanager
async def _kept(server: grpc.aio.Server) -> AsyncIterator[tuple[str, int]]:
    """The server, which nobody holds much of: its address and port. It ends after 30 seconds at most."""
    address = bind(server, "127.0.0.1", 0)
    port = int(address.rpartition(":")[2])
    await server.start()
    keeping = asyncio.create_task(limit_connections({port: 1024}))
    async with asyncio.timeout(30):
        yield address, port
    keeping.cancel()
    await server.stop(None)


def _with_health() -> grpc.aio.Server:
    server = new_server()
    add_health(server, lambda: True, "outrider.v1.Generation")
    return server


async def test_who_says_half_messages_is_shut_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter had made a verifier keep 1.5 GB, by a hundred streams and for good."""
    monkeypatch.setattr(crowding, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(crowding, "GROWN", -1)
    monkeypatch.setattr(half_said, "FREE_BYTES", 2**12)
    monkeypatch.setattr(crowding, "MOST_HELD", 1.5 * HALF)
    async with _kept(_with_health()) as (address, port), grpc.aio.insecure_channel(address) as sound:
        asking = health_pb2_grpc.HealthStub(sound)
        watch = asking.Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        for _ in range(100):  # far more than a half message has, but each to its end
            await asking.Check(health_pb2.HealthCheckRequest())
        halves = [await _half(port) for _ in range(2)]
        done, left = await asyncio.wait(halves, return_when=asyncio.FIRST_COMPLETED)
        assert (len(done), len(left)) == (1, 1)
        assert not watch.done()
        await asking.Check(health_pb2.HealthCheckRequest())
        watch.cancel()
        for one in left:
            one.cancel()


def test_what_frames_did_not_need_is_no_room_for_half_messages() -> None:
    halves = Halves(lambda: 0.0)
    with halves.call(PEER) as said:
        for _ in range(1000):
            said.message(10)
        before, moved = halves.explained(), {NAME: (40_000, 0)}
        said.message(2**16)  # between the two looks
        halves.settle(before, moved)
        came = 40_000 + 2**16 + FREE_BYTES
        assert halves.held(NAME, came, 0) == 0
        assert halves.held(NAME, came + HALF, 0) > 0.9 * HALF


def test_a_connection_that_is_no_more_leaves_nothing_to_the_next_of_its_name() -> None:
    halves = Halves(lambda: 0.0)
    with halves.call(PEER) as said:
        said.message(2**22)
        halves.wrote(NAME, 2**22)
        halves.settle(halves.explained(), {})
        assert NAME in halves.explained(), "a call of it goes on"
    halves.settle(halves.explained(), {})
    with halves.call(PEER):
        assert halves.held(NAME, 1000, 0) == 0, "it has nothing to take"
        assert halves.held(NAME, 2**22, 0) > 2**21


async def test_who_has_said_much_to_its_end_has_no_room_for_half_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call to the health service is 150 bytes, and 2 KiB were allowed for it: for good."""
    monkeypatch.setattr(crowding, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(crowding, "SETTLED_LOOKS", 1)
    monkeypatch.setattr(half_said, "FREE_BYTES", 2**12)
    monkeypatch.setattr(crowding, "MOST_HELD", HALF / 2)
    settled, settle = asyncio.Event(), half_said.HALVES.settle

    def settle_and_tell(*told: Any) -> None:
        settle(*told)
        settled.set()

    monkeypatch.setattr(half_said.HALVES, "settle", settle_and_tell)
    async with _kept(_with_health()) as (_, port):
        until_shut, writer, heard = await _connected(port)
        await _say(writer, CHECK, bytes(5), range(100), end=1)
        while heard[DATA] < 100:  # noqa: ASYNC110 (frames)
            await asyncio.sleep(0.01)
        for _ in range(2):  # the first may have begun before
            settled.clear()
            await settled.wait()
        await _say(writer, CHECK, FIRST_HALF, [100])
        while not half_said.HALVES._open:  # noqa: ASYNC110 (gRPC tells nobody)
            await asyncio.sleep(0.01)
        monkeypatch.setattr(crowding, "GROWN", -1)
        await until_shut


async def test_who_does_not_take_what_it_asks_for_is_shut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand calls, 40 KB, had made a worker keep as many tokenizers."""
    monkeypatch.setattr(crowding, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(crowding, "GROWN", -1)
    monkeypatch.setattr(crowding, "MOST_HELD", 2**24)
    server, method = new_server(), GET_TOKENIZER[Role.DRAFTER]

    async def tell(asked: None, context: Any) -> TokenizerFiles:
        return TokenizerFiles("tokens", "x" * 2**20, "")

    add_methods(server, {method: tell})
    async with _kept(server) as (address, port), channel(address) as sound:
        few = await _calls(port, method.path, bytes(5), count=8, end=1)
        await (await _calls(port, method.path, bytes(5), count=24, end=1))
        assert not few.done()
        for _ in range(24):
            await ask(sound, method, None, 30)
        few.cancel()
