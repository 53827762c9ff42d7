"""What waits to be written to a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """Messages that wait to be written to one stream: put from anywhere on the loop, iterated by the stream.

    Bounded, so that a peer that does not read cannot fill the memory; the caller decides what a full one
    means (a draft is dropped, a stream of commits is ended).
    """

    def __init__(self, limit: int = 4096) -> None:
        self._queue: asyncio.Queue[T | None] = asyncio.Queue()
        self._limit = limit
        self._closed = False

    def put(self, message: T) -> bool:
        """Takes a message. Returns False if the outbox is full or closed."""
        if self._closed or self._queue.qsize() >= self._limit:
            return False
        self._queue.put_nowait(message)
        return True

    def close(self) -> None:
        """Ends the iteration once what waits has been written."""
        if not self._closed:
            self._closed = True
            self._queue.put_nowait(None)

    async def batches(self, most: int, weight: Callable[[T], int]) -> AsyncIterator[list[T]]:
        """Yields all that waits at a time, up to where its weight comes to `most`."""
        while (message := await self._queue.get()) is not None:
            batch, weighed = [message], weight(message)
            while weighed < most and not self._queue.empty():
                if (message := self._queue.get_nowait()) is None:
                    yield batch
                    return
                batch.append(message)
                weighed += weight(message)
            yield batch

    async def __aiter__(self) -> AsyncIterator[T]:
        while (message := await self._queue.get()) is not None:
            yield message
