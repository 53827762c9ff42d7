"""Answers in brotli or gzip for clients that ask for it. A stream is never held back to be compressed.

Brotli is offered where its package is installed: `outrider[brotli]`.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable, Mapping
from functools import partial

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.threads import beside

try:
    import brotli
except ModuleNotFoundError:
    brotli = None

LEAST_BYTES = 1024  # of a body: below, it saves nothing
INLINE_BYTES = 16 * 1024  # what takes less time than to hand it to a thread
MOST_CODINGS = 16  # that are looked at: a header of 60 KB took the event loop 30 ms, and needs no key
LEVEL = 5  # of both: they take about the same time there

Compress = Callable[[bytes], bytes]


class Compression:
    """An application whose whole answers come compressed. Large ones are compressed beside the event loop."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._codings: dict[str, Compress] = {}  # by name; of those that a client likes equally, the first
        if brotli is not None:
            self._codings["br"] = partial(brotli.compress, quality=LEVEL)
        self._codings["gzip"] = lambda body: gzip.compress(body, LEVEL)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        coding = None
        if scope["type"] == "http":
            coding = _chosen(Headers(scope=scope).get("accept-encoding", ""), self._codings)
        if coding is None:
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
                    message = await _compressed(held, message, coding, self._codings[coding])
                await send(held)
            await send(message)

        await self._app(scope, receive, answer)


def _chosen(accepted: str, codings: Mapping[str, Compress]) -> str | None:
    """Returns the coding that a client likes best; None = none of these."""
    weights: dict[str, float] = {}
    for one in accepted.lower().split(",", MOST_CODINGS)[:MOST_CODINGS]:
        name, _, weight = one.replace(" ", "").partition(";")
        weights[name] = _weight(weight)
    best = max(codings, key=lambda name: weights.get(name, 0.0))
    return best if weights.get(best, 0.0) > 0 else None


def _weight(told: str) -> float:
    """Returns what `q=0.5` says: from 0, not at all, to 1, which it is where nothing legible is said."""
    try:
        weight = float(told.removeprefix("q="))
    except ValueError:
        return 1.0
    return weight if math.isfinite(weight) else 1.0


def _worth(start: Message, message: Message) -> bool:
    headers = Headers(raw=start["headers"])
    return len(message.get("body", b"")) >= LEAST_BYTES and "content-encoding" not in headers


async def _compressed(start: Message, message: Message, coding: str, compress: Compress) -> Message:
    """Returns the message with its body compressed, and lets `start` say so."""
    whole = message["body"]
    body = compress(whole) if len(whole) <= INLINE_BYTES else await beside(compress, whole)
    headers = MutableHeaders(scope=start)
    headers["content-encoding"] = coding
    headers["content-length"] = str(len(body))
    headers.add_vary_header("Accept-Encoding")
    return {**message, "body": body}
