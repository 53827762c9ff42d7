"""The HTTP server's connections: who gives way when there are too many, and who has waited for too long."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import uvicorn

from router.api.http import create_app
from router.api.intake import Intake
from router.api.line import Line
from router.connections import (
    BESIDE_BYTES,
    FREE_PIECES,
    HEAD_BYTES,
    LEAST_PIECE,
    MOST_HEADERS,
    URL_BYTES,
    Connections,
    LimitedProtocol,
)
from router.metrics import Metrics
from tests.router.api.scripted import ScriptedRunner, byte_level, served, steps, until

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 14\r\n\r\n"
CHUNKED = b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Served:
    """A server whose answers wait for `runner.go_on`, and the connections that it has had."""

    runner: ScriptedRunner
    address: tuple[str, int]
    had: list[LimitedProtocol]

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self.address)


class Noted(Connections):
    """Connections, noted."""

    def __init__(self) -> None:
        super().__init__(most=100)
        self.had: list[Any] = []

    def add(self, address: str, connection: Any) -> None:
        self.had.append(connection)
        super().add(address, connection)


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    running = []

    async def start(
        head_seconds: float = 600.0, untaken_seconds: float = 600.0, line: Line | None = None
    ) -> Served:
        runner = ScriptedRunner(served(byte_level()), lambda request: [None, *steps([5, 6, 7])])
        app = create_app(Intake(runner, lambda below: 0, line=line or Line()), Metrics())
        listener = socket.create_server(("127.0.0.1", 0))
        noted = Noted()
        protocol: Any = partial(LimitedProtocol, noted, head_seconds, untaken_seconds)
        server = uvicorn.Server(uvicorn.Config(app, http=protocol, log_level="warning", lifespan="off"))
        running.append((server, asyncio.create_task(server.serve(sockets=[listener]))))
        await until(lambda: server.started)
        return Served(runner, listener.getsockname(), noted.had)

    yield start
    for server, task in running:
        server.should_exit = server.force_exit = True
        await task


async def closed(reader: asyncio.StreamReader) -> bool:
    """Waits until the other side has closed it."""
    try:
        return await reader.read(1) == b""
    except ConnectionResetError:
        return True


async def test_who_says_nothing_or_half_is_closed(serve: Serve) -> None:
    service = await serve(head_seconds=0.0)
    for said in (b"", GET[:20]):
        reader, writer = await service.open()
        writer.write(said)
        assert await closed(reader)
        writer.close()


async def test_half_a_head_after_an_answer_is_closed_too(serve: Serve) -> None:
    service = await serve()
    reader, writer = await service.open()
    writer.write(GET)
    assert b"200 OK" in await reader.readuntil(b"ready\n")
    service.had[0]._head_seconds = 0.0
    writer.write(GET[:20])
    assert await closed(reader)
    writer.close()


async def test_a_head_without_an_end_is_closed(serve: Serve) -> None:
    service = await serve()
    reader, writer = await service.open()
    writer.write(b"GET /health HTTP/1.1\r\n" + b"a: b%s\r\n" % (b"b" * HEAD_BYTES))
    assert b"200" not in await reader.read()
    writer.close()


async def test_a_head_of_many_headers_is_refused_before_they_are_kept(serve: Serve) -> None:
    """Each takes a client four bytes and the router 150, for which nobody needs a key."""
    service = await serve()
    for before in (b"", POST + b'{"prompt":"a"}'):  # nor behind the body of a request that was refused
        reader, writer = await service.open()
        if before:
            service.runner.go_on.set()
            writer.write(before)
            assert b"200 OK" in await reader.readuntil(b"}}")
        writer.write(b"GET /health HTTP/1.1\r\n" + b"a:\r\n" * (MOST_HEADERS + 1) + b"a:\r\n" * 9999)
        answer = await reader.read()
        assert b"HTTP/1.1 431 " in answer and b"at most 256 headers" in answer
        assert len(service.had[-1].headers) == MOST_HEADERS
        writer.close()
    reader, writer = await service.open()
    writer.write(GET[:-2] + b"a:\r\n" * (MOST_HEADERS - 1) + b"\r\n")
    assert b"200 OK" in await reader.readuntil(b"ready\n")
    writer.close()


async def test_a_long_address_is_refused_before_it_is_taken_apart(serve: Serve) -> None:
    """A query of so many parts kept the event loop for 20 ms."""
    service = await serve()
    for pieces in ([b"GET /health?" + b"a&" * URL_BYTES], [b"GET /health?", *[b"a&" * 2048] * 4]):
        reader, writer = await service.open()
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 414 ") and b"at most 8192 bytes" in answer
        writer.close()
    reader, writer = await service.open()
    writer.write(GET.replace(b"/health", b"/health?" + b"a" * (URL_BYTES - 8)))
    assert b"200 OK" in await reader.readuntil(b"ready\n")
    writer.close()


async def test_a_body_in_another_transfer_encoding_is_refused(serve: Serve) -> None:
    """Its bytes would be read as they are."""
    service = await serve()
    chunked = b'e\r\n{"prompt":"a"}\r\n0\r\n\r\n'
    service.runner.go_on.set()
    for said, status in (
        (b"transfer-encoding: gzip, chunked", b"501"),
        (b"transfer-encoding: gzip\r\ntransfer-encoding: chunked", b"501"),
        (b"Transfer-Encoding:  Chunked ", b"200"),
    ):
        reader, writer = await service.open()
        writer.write(POST.replace(b"content-length: 14", said) + chunked)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 " + status)
        writer.close()


async def test_one_that_is_answered_has_no_time_limit_and_keeps_its_place(serve: Serve) -> None:
    service = await serve()
    reader, writer = await service.open()
    writer.write(POST)
    await until(lambda: len(service.had) == 1 and service.had[0].cycle is not None)
    assert service.had[0].waits()  # for the body
    writer.write(b'{"prompt":"a"}')
    await service.runner.waiting.wait()
    assert not service.had[0].waits() and service.had[0]._late is None
    service.runner.go_on.set()
    assert b"200 OK" in await reader.readuntil(b"}")
    writer.close()


class HeldLine(Line):
    """One in which nobody has a turn before `go_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.come = 0
        self.go_on = asyncio.Event()

    async def turn(self, owner: str) -> None:
        self.come += 1
        await self.go_on.wait()
        await super().turn(owner)


async def test_a_request_whose_client_has_left_before_its_turn_is_not_begun(serve: Serve) -> None:
    line = HeldLine()
    service = await serve(line=line)
    service.runner.go_on.set()
    for leaves in (True, False, True):
        reader, writer = await service.open()
        writer.write(POST + b'{"prompt":"a"}')
        before = line.come
        await until(lambda before=before: line.come > before)
        if leaves:
            writer.close()
            await until(lambda: service.had[-1].cycle.disconnected)
        else:
            stays = reader, writer
    line.go_on.set()
    assert b"200 OK" in await stays[0].readuntil(b"}}")
    stays[1].close()
    reader, writer = await service.open()
    writer.write(POST + b'{"prompt":"a"}')
    assert b"200 OK" in await reader.readuntil(b"}}"), "the line goes on"
    assert len(service.runner.requests) == 2
    writer.close()


@pytest.mark.parametrize("path", [b"/v1/completions", b"/tokenize"])
async def test_a_request_has_its_turn_when_its_body_has_come(serve: Serve, path: bytes) -> None:
    """Else those whose last bytes come together would begin together."""
    line = HeldLine()
    service = await serve(line=line)
    service.runner.go_on.set()
    line.go_on.set()
    reader, writer = await service.open()
    writer.write(POST.replace(b"/v1/completions", path) + b'{"prompt":')
    await until(lambda: bool(service.had) and service.had[0].cycle is not None)
    await until(lambda: not service.had[0].cycle.body)  # that is read
    assert line.come == 0
    writer.write(b'"a"}')
    assert b"200 OK" in await reader.readuntil(b"}")
    assert line.come == 1
    writer.close()


async def test_requests_that_come_before_the_former_is_answered_take_no_place(serve: Serve) -> None:
    service = await serve()
    reader, writer = await service.open()
    writer.write(POST + b'{"prompt":"a"}' + GET * 5000)
    await service.runner.waiting.wait()
    answered = service.had[0].cycle
    writer.write(GET * 5000)
    assert len(service.had[0].pipeline) == 0
    assert service.had[0].cycle is answered  # so that it is told if its client leaves
    service.runner.go_on.set()
    assert b"200 OK" in await reader.readuntil(b"}")
    writer.close()


async def test_headers_after_a_body_are_dropped(serve: Serve) -> None:
    service = await serve()
    _, writer = await service.open()
    writer.write(CHUNKED % b"/v1/completions" + b'e\r\n{"prompt":"a"}\r\n0\r\n' + b"a: b\r\n" * 200)
    writer.write(b"\r\n")
    await service.runner.waiting.wait()
    assert len(service.had[0].cycle.scope["headers"]) == 2
    writer.close()


async def test_a_body_in_pieces_of_a_byte_is_refused_before_they_are_gone_through(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a call from the parser: eight connections without a key kept /health waiting for a second."""
    told: list[int] = []  # how long each was that the parser told of
    on_body = LimitedProtocol.on_body
    monkeypatch.setattr(LimitedProtocol, "on_body", lambda *args: (told.append(len(args[1])), on_body(*args)))
    service = await serve()
    for path in (b"/v1/completions", b"/nothing"):
        told.clear()
        reader, writer = await service.open()
        writer.write(CHUNKED % path + b"1\r\n \r\n" * (9 * FREE_PIECES))
        answer = await reader.read()
        assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 404 "))
        assert len(told) == FREE_PIECES + FREE_PIECES // LEAST_PIECE + 1
        writer.close()
    reader, writer = await service.open()
    service.runner.go_on.set()
    few = (
        b"1;a=%s\r\n \r\n" % (b"b" * 85) * 1000
        + b"40\r\n%s\r\n" % (b" " * 64) * 9000
        + b'e\r\n{"prompt":"a"}\r\n0\r\n'
    )
    writer.write(CHUNKED % b"/v1/completions" + few + b"\r\n")
    assert b"200 OK" in await reader.readuntil(b"}}")
    writer.close()


async def test_headers_after_a_body_without_an_end_are_refused(serve: Serve) -> None:
    service = await serve()
    reader, writer = await service.open()
    writer.write(
        CHUNKED % b"/v1/completions" + b'e\r\n{"prompt":"a"}\r\n0\r\n' + b"a:\r\n" * (MOST_HEADERS + 1)
    )
    assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
    writer.close()


@pytest.mark.parametrize(
    ("path", "begun"),
    [(b"/v1/completions", b"0\r\nx: "), (b"/nothing", b"0\r\nx: "), (b"/v1/completions", b"1;x=")],
    ids=["header", "header of who is refused", "chunk's extension"],
)
async def test_a_line_behind_a_body_without_an_end_is_not_kept(
    serve: Serve, path: bytes, begun: bytes
) -> None:
    """One connection had others' four tokens take a second; some without a key made a router 100 MB larger a
    second, for as long as the collector saw no reason to look."""
    service = await serve()
    _, writer = await service.open()
    writer.write(CHUNKED % path + b"2\r\n{}\r\n" + begun)
    await until(lambda: service.had)
    (held,) = service.had
    parser = weakref.ref(held.parser)
    gc.disable()
    try:
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                writer.write(b"a" * 2**16)
                await writer.drain()
        await until(lambda: held.parser is None)
        assert held._beside_bytes < BESIDE_BYTES + 2**18 + 100, "a read more"
        assert parser() is None
    finally:
        gc.enable()
    writer.close()


async def test_a_request_that_asks_for_another_protocol_keeps_its_body(serve: Serve) -> None:
    service = await serve()
    upgrade = b"connection: upgrade\r\nupgrade: h2c\r\n"
    chunked = POST.replace(b"content-length: 14", b"transfer-encoding: chunked")
    service.runner.go_on.set()
    for head, body in ((POST, b'{"prompt":"a"}'), (chunked, b'e\r\n{"prompt":"a"}\r\n0\r\n\r\n')):
        asked = head.replace(b"\r\n\r\n", b"\r\n" + upgrade + b"\r\n")
        for pieces in ([asked + body], [asked, body[:5], body[5:]]):
            reader, writer = await service.open()
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.01)  # most likely as a segment of its own
            assert b"200 OK" in await reader.readuntil(b'"numerics_changes":0}}')
            writer.write(GET)
            assert b"200 OK" in await reader.readuntil(b"ready\n")
            writer.close()


async def test_who_does_not_take_what_is_written_is_closed(serve: Serve) -> None:
    service = await serve(untaken_seconds=0.0)
    reader, writer = await service.open()
    writer.write(POST + b'{"prompt":"a"}')
    await service.runner.waiting.wait()
    service.had[0].pause_writing()  # as the transport does
    assert await closed(reader)
    await until(lambda: service.runner.open == 0)
    writer.close()


async def test_what_is_written_to_who_has_left_is_not_told_in_the_log(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """A few hundred streams that were left amid an answer had made 73 lines of it."""
    service = await serve()
    _, writer = await service.open()
    await until(lambda: len(service.had) == 1)
    service.had[0].transport.abort()
    for _ in range(100):
        service.had[0].transport.write(b"data: {}\n\n")
    assert not caplog.records
    writer.close()


async def test_who_takes_it_at_last_is_not(serve: Serve) -> None:
    service = await serve()
    _, writer = await service.open()
    writer.write(GET)
    await until(lambda: len(service.had) == 1)
    service.had[0].pause_writing()
    service.had[0].resume_writing()
    assert service.had[0]._untaken is None
    writer.close()
