"""What is written to a call is taken in time, or the call ends: gRPC itself would keep it, and wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from outrider.errors import Unavailable

UNTAKEN_SECONDS = 60.0  # in which a peer takes a message that is written to it


@asynccontextmanager
async def taken_in_time(
    context: grpc.aio.ServicerContext[Any, Any],
) -> AsyncIterator[Callable[[bytes], Awaitable[None]]]:
    """Gives what writes a message to a call. It raises Unavailable if the peer does not take one, and
    CancelledError if it has gone: gRPC's own error would be logged with a trace."""
    limit = asyncio.timeout(None)
    writing = _Writing(context, limit)
    try:
        async with limit:
            yield writing.write
    except TimeoutError:
        if not limit.expired():
            raise
        raise Unavailable(f"what was written to this call was not taken for {UNTAKEN_SECONDS:g} s") from None
    finally:
        writing.close()


class _Writing:
    """Looks now and then whether a message waits for too long. A timer for each message would take a tenth of
    what the message does."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], limit: asyncio.Timeout) -> None:
        self._context, self._limit = context, limit
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None  # a message is being written
        self._timer = self._loop.call_later(UNTAKEN_SECONDS, self._look)

    async def write(self, message: bytes) -> None:
        self._since = self._loop.time()
        try:
            await self._context.write(message)
        except grpc.aio.InternalError:
            raise asyncio.CancelledError from None
        finally:
            self._since = None

    def _look(self) -> None:
        now = self._loop.time()
        left = UNTAKEN_SECONDS if self._since is None else self._since + UNTAKEN_SECONDS - now
        if left <= 0:
            self._limit.reschedule(now)
        else:
            self._timer = self._loop.call_later(left, self._look)

    def close(self) -> None:
        self._timer.cancel()
