"""GET /v1/live: the live service, by server-sent events, two a second while somebody looks."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

from outrider.errors import OutriderError, Overloaded
from router.api.access import owner
from router.api.connection import EventStream, ServerSentEvent
from router.api.json_text import to_json
from router.api.openapi import LIVE
from router.api.responses import error_body
from router.api.stream import last_words
from router.metrics import Metrics

PERIOD_SECONDS = 0.5
MOST_LISTENERS = 32  # of this router
MOST_OF_ONE = 8  # of one API key's owner, where keys are asked for


@dataclass(frozen=True, slots=True)
class _Told:
    """What was written down last, and when."""

    at: float  # seconds since the router's start
    text: str


class Live:
    """What is told is written down once in a period for all who listen, and once for each owner of them."""

    def __init__(
        self,
        service: Callable[[], Mapping[str, Any]],
        sessions_of: Callable[[str], list[dict[str, Any]]],
        period: float = PERIOD_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._sessions_of = sessions_of
        self._period = period
        self._clock = clock
        self._begun = clock()
        self._listeners: Counter[str] = Counter()  # by owner
        self._service_told: _Told | None = None
        self._sessions_told: dict[str, _Told] = {}  # by owner, of those who listen
        self._over = asyncio.Event()

    async def events(self, owner: str) -> AsyncGenerator[ServerSentEvent, None]:
        """Ends with the router. Raises Overloaded."""
        if self._listeners.total() >= MOST_LISTENERS or (owner and self._listeners[owner] >= MOST_OF_ONE):
            raise Overloaded("as many as may look at the live service do so already; close another page")
        self._listeners[owner] += 1
        try:
            while not self._over.is_set():
                yield ServerSentEvent(self._now(owner))
                try:
                    async with asyncio.timeout(self._period):
                        await self._over.wait()
                except TimeoutError:
                    continue
        finally:
            self._listeners -= Counter([owner])  # which forgets who has none left
            if owner not in self._listeners:
                self._sessions_told.pop(owner, None)

    def stop(self) -> None:
        """The router is about to go."""
        self._over.set()

    def _now(self, owner: str) -> str:
        self._service_told = self._fresh(self._service_told, self._service)
        own = self._fresh(self._sessions_told.get(owner), lambda: self._sessions_of(owner))
        self._sessions_told[owner] = own
        return f'{{"seconds":{own.at:.3f},"service":{self._service_told.text},"sessions":{own.text}}}'

    def _fresh(self, told: _Told | None, now: Callable[[], Any]) -> _Told:
        at = self._clock() - self._begun
        if told is not None and at - told.at < self._period / 2:
            return told
        return _Told(at, to_json(now()))


def add_live(app: FastAPI, live: Live, metrics: Metrics) -> None:
    """The application answers GET /v1/live."""

    @app.get("/v1/live", **LIVE)
    async def events() -> Response:
        """The live service: workers, round trips, prices, and the caller's own sessions; twice a second."""
        return EventStream(live.events(owner()), lambda error: last_words(error, metrics, _refused))


def _refused(error: OutriderError) -> list[ServerSentEvent]:
    return [ServerSentEvent(to_json(error_body(error)))]
