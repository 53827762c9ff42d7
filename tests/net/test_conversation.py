"""How a stream ended is told as its server said it, over real loopback connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.errors import Overloaded
from outrider.net.conversation import converse
from outrider.net.rpc import add_methods, new_server
from outrider.wire.drafter_sessions import DraftEndCause, DraftEnded, DrafterCommand, DrafterEvents
from outrider.wire.methods import JOIN
from tests.net.connected import connected

TRIES = 200  # without our own way some ten of them end as INTERNAL
SAID = DrafterEvents(ended=[DraftEnded(b"s" * 16, DraftEndCause.FAILED, "x" * 900, 1)] * 16)


@asynccontextmanager
async def joined(refuses: bool) -> AsyncIterator[grpc.aio.Channel]:
    """To a server that ends a stream at its third message."""

    async def join(messages: AsyncIterator[bytes], _: Any) -> AsyncIterator[DrafterCommand]:
        for _ in range(3):
            await anext(messages)
        if refuses:
            raise Overloaded("that is enough")
        yield DrafterCommand()

    server = new_server()
    add_methods(server, {JOIN: join}, decoded=False)
    async with connected(server) as connection:
        yield connection


@pytest.mark.parametrize("written", [True, False])
async def test_a_refusal_is_told_whoever_writes_meanwhile(written: bool) -> None:
    async def talking() -> AsyncIterator[DrafterEvents]:
        while True:
            yield SAID

    async with joined(refuses=True) as connection:
        for _ in range(TRIES):
            call = converse(connection, JOIN, None if written else talking())

            async def write(call: Any = call) -> None:
                while True:
                    await call.write(SAID)

            writing = asyncio.create_task(write() if written else asyncio.sleep(0))
            with pytest.raises(grpc.aio.AioRpcError) as read:
                async for _ in call.heard():
                    pass
            (wrote,) = await asyncio.gather(writing, return_exceptions=True)
            for end in (read.value, *([wrote] if written else [])):
                assert isinstance(end, grpc.aio.AioRpcError)
                assert (end.code(), end.details()) == (
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    "that is enough",
                )


async def test_a_stream_that_ended_well_is_read_to_its_end_whoever_writes_meanwhile() -> None:
    async with joined(refuses=False) as connection:
        for _ in range(TRIES):
            call = converse(connection, JOIN)

            async def write(call: Any = call) -> None:
                while True:
                    await call.write(SAID)

            writing = asyncio.create_task(write())
            assert len([told async for told in call.heard()]) == 1
            (wrote,) = await asyncio.gather(writing, return_exceptions=True)
            assert isinstance(wrote, grpc.aio.AioRpcError) and wrote.code() is grpc.StatusCode.OK
