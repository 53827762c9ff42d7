"""A hop that is slow and has room: what comes behind a large message waits for seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.net import questions
from outrider.net.rpc import bind, channel, new_server

LARGE = 2 * 2**20  # bytes; some 5 s where a ping's answer is waited for 3 s
RATE = 400 * 2**10  # bytes a second, in each direction


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while some := await reader.read(2**14):
            await asyncio.sleep(len(some) / RATE)
            writer.write(some)
            await writer.drain()
    writer.close()


async def length(asked: bytes, context: Any) -> bytes:
    return str(len(asked)).encode()


async def large(asked: bytes, context: Any) -> bytes:
    return bytes(LARGE)


async def through_slow_hop(call: Callable[[bytes, Any], Awaitable[bytes]], asked: bytes) -> bytes:
    """Returns the answer to a call whose client and server are ours."""
    server = new_server()
    handlers = {"Call": grpc.unary_unary_rpc_method_handler(call)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.Service", handlers),))
    port = int(bind(server, "127.0.0.1", 0).rpartition(":")[2])
    await server.start()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pass_on(reader, there_writer), pass_on(there_reader, writer))

    hop = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        async with channel("127.0.0.1:{1}".format(*hop.sockets[0].getsockname())) as connection:
            return bytes(await connection.unary_unary("/a.Service/Call")(asked))
    finally:
        hop.close()
        await server.stop(None)


async def test_large_messages_pass_it_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "QUESTION_SECONDS", 60.0)
    up, down = await asyncio.gather(through_slow_hop(length, bytes(LARGE)), through_slow_hop(large, b""))
    assert (up, len(down)) == (str(LARGE).encode(), LARGE)
