"""Answers in gzip for clients that ask for it. A stream is never held back to be compressed."""

from __future__ import annotations

import asyncio
import gzip

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LEAST_BYTES = 1024  # of a body: below, it saves nothing
INLINE_BYTES = 16 * 1024  # what takes less time than to hand it to a thread
LEVEL = 5


class Gzip:
    """An application whose whole answers come compressed. Large ones are compressed beside the event loop."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _wanted(Headers(scope=scope).get("accept-encoding", "")):
            await self._app(scope, receive, send)
            return
        start: Message | None = None  # held until it is known if all of the body comes at once

        async def answer(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
                return
            held, start = start, None
            if held is not None:
                if not message.get("more_body") and _worth(held, message):
                    message = await _compressed(held, message)
                await send(held)
            await send(message)

        await self._app(scope, receive, answer)


def _wanted(accepted: str) -> bool:
    for one in accepted.lower().split(","):
        name, _, weight = one.replace(" ", "").partition(";")
        if name == "gzip":
            return weight not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def _worth(start: Message, message: Message) -> bool:
    headers = Headers(raw=start["headers"])
    return len(message.get("body", b"")) >= LEAST_BYTES and "content-encoding" not in headers


async def _compressed(start: Message, message: Message) -> Message:
    """Returns the message with its body in gzip, and lets `start` say so."""
    whole = message["body"]
    if len(whole) <= INLINE_BYTES:
        body = gzip.compress(whole, LEVEL)
    else:
        body = await asyncio.to_thread(gzip.compress, whole, LEVEL)
    headers = MutableHeaders(scope=start)
    headers["content-encoding"] = "gzip"
    headers["content-length"] = str(len(body))
    headers.add_vary_header("Accept-Encoding")
    return {**message, "body": body}
