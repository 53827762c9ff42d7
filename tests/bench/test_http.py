"""The bench's HTTP, before servers that speak it wrongly."""

from __future__ import annotations

import asyncio

import pytest

from outrider.errors import Unavailable
from outrider_cli.bench import http
from outrider_cli.bench.http import Http


@pytest.mark.parametrize(
    "said",
    [
        b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        b"transfer-encoding: chunked\r\n\r\n-5\r\n",
        b"content-length: many\r\n\r\n",
        b"content-length: -1\r\n\r\n",
        b"content-length: 9\r\n\r\nx",
    ],
)
async def test_a_body_without_a_sound_length_is_a_broken_connection(said: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n" + said)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    with pytest.raises(Unavailable, match="broke before the answer was complete"):
        async with Http(f"http://{host}:{port}").asked("GET", "/") as response:
            await response.read()
    server.close()


async def test_who_says_nothing_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "SILENT_SECONDS", 0.1)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    with pytest.raises(Unavailable, match="broke before the answer was complete"):
        async with Http(f"http://{host}:{port}").asked("GET", "/"):
            raise AssertionError("nothing was said")
    server.close()


async def test_an_answer_that_goes_on_is_not_cut_off_however_long_it_is() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\none\n")
        await writer.drain()
        await go_on.wait()
        writer.write(b"two\n")
        writer.close()

    go_on = asyncio.Event()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with Http(f"http://{host}:{port}").asked("GET", "/") as response:
        ends = [response.silence.when() or 0.0]
        async for _ in response.lines():
            ends.append(response.silence.when() or 0.0)
            go_on.set()
    assert ends[0] < ends[1] < ends[2]
    server.close()
