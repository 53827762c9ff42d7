"""Answers that wait for their clients: who holds too much of them is closed, and nobody else."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from outrider.net.tls import opened
from router.connections import Connections, LimitedProtocol
from router.handshakes import Handshake
from router.untaken import Untaken
from tests.certificates import Authority
from tests.router.api.scripted import until

MOST = 2**22  # bytes
BUFFER = 4096  # bytes that the kernel keeps, for either side
GET = b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n"


@dataclass(eq=False)
class Peer:
    """A connection of nobody."""

    address: str
    waits: int = 0
    dropped: bool = False

    def untaken(self) -> int:
        return self.waits

    def drop(self) -> None:
        self.dropped = True


def test_of_the_address_that_holds_most_the_one_that_holds_most_is_closed() -> None:
    untaken = Untaken(most=100)
    peers = [Peer("a", 30), Peer("a", 20), Peer("b", 45), Peer("c", 0)]
    for peer in peers:
        untaken.wrote(peer)
    assert not any(peer.dropped for peer in peers)
    peers[3].waits = 6
    untaken.wrote(peers[3])
    assert [peer.dropped for peer in peers] == [True, False, False, False]


def test_where_there_is_too_much_some_room_is_made() -> None:
    """Each more that waits would have all looked at again."""
    untaken = Untaken(most=100)
    peers = [Peer(str(number), 10) for number in range(11)]
    for peer in peers:
        untaken.wrote(peer)
    assert sum(peer.dropped for peer in peers) == 3


def test_what_was_taken_or_closed_since_does_not_count() -> None:
    untaken = Untaken(most=100)
    first, second, third = Peer("a", 60), Peer("a", 40), Peer("b", 60)
    for peer in (first, second):
        untaken.wrote(peer)
    first.waits = 0
    untaken.wrote(third)
    assert untaken._total == 100
    untaken.forget(second)
    untaken.forget(second)
    untaken.wrote(Peer("b", 40))
    assert not any(peer.dropped for peer in (first, second, third))


async def large(scope: Any, receive: Any, send: Any) -> None:
    """An application whose answers have as many bytes as the path says."""
    size = int(scope["path"][1:])
    headers = [(b"content-length", b"%d" % size)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": bytes(size)})


@dataclass
class Service:
    connections: Connections
    address: tuple[str, int]
    trust: ssl.SSLContext | None

    async def ask(self, size: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        plain.setblocking(False)
        await asyncio.get_running_loop().sock_connect(plain, self.address)
        name = None if self.trust is None else self.address[0]
        reader, writer = await asyncio.open_connection(sock=plain, ssl=self.trust, server_hostname=name)
        writer.write(GET % size)
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        return reader, writer


@pytest.fixture(params=["http", "https"])
async def service(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Service]:
    connections, trust = Connections(100, untaken=Untaken(MOST)), None
    config = uvicorn.Config(large, log_level="warning", lifespan="off", timeout_keep_alive=600)
    config.load()
    state = uvicorn.Server(config).server_state
    make: Any = partial(LimitedProtocol, connections, config=config, server_state=state, app_state={})
    if request.param == "https":
        files = Authority().write(tmp_path, "127.0.0.1")
        tls = opened(files)
        assert tls is not None
        trust = ssl.create_default_context(cafile=str(files.ca))
        make = partial(Handshake, connections, make, tls.http_context())
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)  # connections have it from there
    server = await asyncio.get_running_loop().create_server(make, sock=listener)
    yield Service(connections, server.sockets[0].getsockname(), trust)
    server.close()


async def test_who_reads_nothing_of_large_answers_loses_its_own(service: Service) -> None:
    """Forty had taken 5 MB each of a router, for requests of 330 KB; and their key's limits did not count
    them."""
    small, large = MOST // 2, MOST // 4 * 3  # that what clients read ahead does not make up for
    reader, writer = await service.ask(large)
    other, its = await service.ask(small)
    with pytest.raises((asyncio.IncompleteReadError, OSError)):
        await reader.readexactly(large)
    assert await other.readexactly(small) == bytes(small), "nobody else's is closed"
    for each in (writer, its):
        each.close()
    await until(lambda: service.connections.untaken._total == 0)
