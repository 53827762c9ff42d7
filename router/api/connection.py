"""A client's connection: its end is noticed while an answer is made, and no silence ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, suppress
from itertools import chain
from typing import NamedTuple, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.threads import beside

T = TypeVar("T")
Parts = Callable[[], Iterator[bytes]]
"""What is long, in parts, each made when it is asked for; none is empty."""

KEEP_ALIVE_SECONDS = 5.0  # a client that hears nothing for some of these takes the connection for broken
# No blank line after it: there are decoders that take an id and a blank line for an event without data.
KEEP_ALIVE = b": keep-alive\n"
NOTHING: Iterator[bytes] = iter(())


class ClientLeft(Exception):
    """The client has closed its connection; what was being made for it is cancelled."""


async def while_connected(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """Returns the work's result. `receive` must have given the whole body already.

    Raises ClientLeft, after the cancelled work has ended, and whatever the work raises."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class LongJson(Response):
    """A JSON answer that is made while its client takes it, so that little of it is ever there."""

    media_type = "application/json"

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientLeft, OSError):  # as of an EventStream
            await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        parts = self._parts()
        while part := await beside(next, parts, b""):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class ServerSentEvent(NamedTuple):
    """html.spec.whatwg.org, server-sent events."""

    data: str | Parts  # one line
    id: str | None = None  # what a client that has the event gives as Last-Event-ID
    event: str | None = None  # its name

    def encoded(self) -> tuple[bytes, Iterator[bytes]]:
        """Returns it, and, of a long one, what follows in parts, each made when it is asked for."""
        identity = "" if self.id is None else f"id: {self.id}\n"
        name = "" if self.event is None else f"event: {self.event}\n"
        if isinstance(self.data, str):
            return f"{identity}{name}data: {self.data}\n\n".encode(), NOTHING
        return f"{identity}{name}data: ".encode(), chain(self.data(), [b"\n\n"])


class EventStream(Response):
    """Server-sent events. The source is closed at its end and when the client leaves.

    The status is sent with the first event: until then an error of the source is raised, and can still become
    a status. It is sent without one after KEEP_ALIVE_SECONDS; from then on errors are events."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[ServerSentEvent, None],
        told: Callable[[Exception], Sequence[ServerSentEvent]],
        keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
    ) -> None:
        """`told`: an error in the middle as last events."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._told = told
        self._keep_alive_seconds = keep_alive_seconds
        self._started = False
        self._writing = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            try:
                await while_connected(receive, self._send_all(send))
            except (ClientLeft, OSError):  # OSError: a server that reports the closed connection on send
                return

    async def _send_all(self, send: Send) -> None:
        self._written_at = asyncio.get_running_loop().time()
        keeping_alive = asyncio.create_task(self._keep_alive(send))
        try:
            events = aiter(self._events)
            while True:
                try:
                    event = await anext(events)
                except StopAsyncIteration:
                    break
                except Exception as error:
                    if not self._started:
                        raise
                    for event in self._told(error):
                        await self._write(send, *event.encoded())
                    break
                await self._write(send, *event.encoded())
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            keeping_alive.cancel()
            await asyncio.gather(keeping_alive, return_exceptions=True)

    async def _write(self, send: Send, body: bytes, parts: Iterator[bytes] = NOTHING) -> None:
        async with self._writing:
            if not self._started:
                self._started = True
                start = {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
                await send(start)
            await send({"type": "http.response.body", "body": body, "more_body": True})
            while parts is not NOTHING and (part := await beside(next, parts, b"")):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            self._written_at = asyncio.get_running_loop().time()

    async def _keep_alive(self, send: Send) -> None:
        now = asyncio.get_running_loop().time
        while True:
            silent_until = self._written_at + self._keep_alive_seconds
            if now() < silent_until:
                await asyncio.sleep(silent_until - now())
            else:
                await self._write(send, KEEP_ALIVE)
