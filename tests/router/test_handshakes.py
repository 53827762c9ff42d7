"""A connection counts while its TLS handshake goes on, and not for longer than that may take."""

from __future__ import annotations

import asyncio
import ssl
import tracemalloc
from asyncio import sslproto
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvicorn

from outrider.net.tls import opened
from router.connections import Connections, LimitedProtocol
from router.handshakes import Handshake
from tests.certificates import Authority
from tests.router.api.scripted import application, until
from tests.router.test_connections import GET, closed

MOST = 4


class Service:
    """An HTTPS server that has at most MOST connections."""

    def __init__(self, folder: Path) -> None:
        files = Authority().write(folder, "127.0.0.1")
        tls = opened(files)
        assert tls is not None
        self._tls = tls
        self.trust = ssl.create_default_context(cafile=str(files.ca))
        self.connections = Connections(MOST)
        self.seconds = 600.0

    async def start(self) -> None:
        config = uvicorn.Config(application(), log_level="warning", lifespan="off")
        config.load()
        state = uvicorn.Server(config).server_state

        def make() -> LimitedProtocol:
            return LimitedProtocol(self.connections, config=config, server_state=state, app_state={})

        def accepted() -> Handshake:
            return Handshake(self.connections, make, self._tls.http_context(), self.seconds)

        self.server = await asyncio.get_running_loop().create_server(accepted, "127.0.0.1", 0)
        self.address = self.server.sockets[0].getsockname()

    async def ask(self) -> bytes:
        reader, writer = await asyncio.open_connection(*self.address, ssl=self.trust)
        writer.write(GET)
        answer = await reader.readuntil(b"\r\n\r\nready\n")
        writer.close()
        return answer


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    made = Service(tmp_path)
    await made.start()
    yield made
    made.server.close()


async def test_those_that_say_nothing_are_no_more_than_the_most(service: Service) -> None:
    silent = [await asyncio.open_connection(*service.address) for _ in range(MOST)]
    for number in range(3):
        await until(lambda: service.connections._count == MOST)
        reader, _ = silent[number]
        assert not reader.at_eof()
        assert b"200 OK" in await service.ask(), "the oldest of them gives way"
        assert await closed(reader)
        await until(lambda: service.connections._count == MOST - 1)
        silent.append(await asyncio.open_connection(*service.address))
    for _, writer in silent:
        writer.close()
    await until(lambda: service.connections._count == 0)


async def test_one_that_says_nothing_takes_little_memory(service: Service) -> None:
    tracemalloc.start()
    try:
        silent = [await asyncio.open_connection(*service.address) for _ in range(MOST)]
        await until(lambda: service.connections._count == MOST)
        taken = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, sslproto.__file__)])
    finally:
        tracemalloc.stop()
    assert 0 < sum(each.size for each in taken.statistics("filename")) < MOST * 64 * 1024
    for _, writer in silent:
        writer.close()


async def test_one_that_says_nothing_or_nonsense_is_closed_and_forgotten(service: Service) -> None:
    service.seconds = 0.05
    for said in (b"", GET):
        reader, writer = await asyncio.open_connection(*service.address)
        writer.write(said)
        while not await closed(reader):
            pass
        writer.close()
        await until(lambda: service.connections._count == 0)


async def test_what_comes_with_the_end_of_the_handshake_is_answered(service: Service) -> None:
    """Of TLS 1.3 a client's first words may be in the same packet as its last of the handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = service.trust.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    reader, writer = await asyncio.open_connection(*service.address)
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            writer.write(outgoing.read())
            incoming.write(await reader.read(2**16))
    tls.write(GET)
    writer.write(outgoing.read())  # both at once
    told = b""
    while not told.endswith(b"ready\n"):
        incoming.write(await reader.read(2**16))
        try:
            told += tls.read()
        except ssl.SSLWantReadError:
            continue
    writer.close()
    await until(lambda: service.connections._count == 0)
