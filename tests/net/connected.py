"""A server of a test, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from outrider.net.rpc import bind, channel


@asynccontextmanager
async def connected(server: grpc.aio.Server) -> AsyncIterator[grpc.aio.Channel]:
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with channel(address) as connection:
            yield connection
    finally:
        await server.stop(None)
