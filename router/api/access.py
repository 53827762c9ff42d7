"""Who may use the API, and how much at a time: keys before HTTP and gRPC alike.

Without keys everybody may. With them all but OPEN asks for one: `Authorization: Bearer KEY` or `x-api-key:
KEY` over HTTP, the former as metadata over gRPC. A session belongs to the name that began it.
"""

from __future__ import annotations

import math
import time
from collections import Counter as Tally
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

from prometheus_client import Counter, Gauge
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.errors import InvalidRequest, Overloaded, Unauthenticated
from outrider.net.rpc import status
from router.api import page
from router.api.keys import ApiKey, Keys, find
from router.api.refusals import refusal
from router.metrics import Metrics

# Nothing of anybody's is there.
OPEN = frozenset({"/health", "/ready", "/metrics", "/openapi.json", *page.PATHS})
SCHEME = "bearer"
MINUTE = 60.0

_owner: ContextVar[str] = ContextVar("owner", default="")


_admission: ContextVar[_Admission | None] = ContextVar("admission", default=None)


def owner() -> str:
    """Returns the name of the key of the request that is being answered, or "" if none is asked for."""
    return _owner.get()


def count_sessions(sessions: int) -> None:
    """Counts the sessions of the request that is being answered, once they are known: until then it counts as
    one. Raises Overloaded if they are too many now, InvalidRequest if they always are."""
    admission = _admission.get()
    if admission is not None and sessions > admission.sessions:
        admission.access.check(admission.key, sessions, sessions - admission.sessions)
        admission.access.add(admission, sessions - admission.sessions)


@dataclass(slots=True)
class _Admission:
    """A request in progress."""

    access: Access
    key: ApiKey
    sessions: int = 0


class Access:
    """The keys, and what each name uses at the moment."""

    def __init__(
        self,
        keys: Keys,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` gives seconds."""
        self._keys = keys
        self.metrics = metrics
        self._clock = clock
        self._running: Tally[str] = Tally()
        self._due: dict[str, float] = {}  # name -> when the requests so far would end, came they evenly
        registry = metrics.registry
        self._requests = Counter("outrider_key_requests", "Requests, by key.", ["key"], registry=registry)
        self._refused = Counter(
            "outrider_key_requests_refused",
            "Requests over a key's limit.",
            ["key", "limit"],
            registry=registry,
        )
        self._in_progress = Gauge(
            "outrider_key_requests_running", "Requests in progress, by key.", ["key"], registry=registry
        )

    def identify(self, authorization: str | None) -> ApiKey:
        """Returns whose request it is, from its header; owner() says so from now on. Raises
        Unauthenticated."""
        scheme, _, shown = (authorization or "").partition(" ")
        if scheme.lower() != SCHEME or not shown.strip():
            raise Unauthenticated("this service asks for an API key: send it as Authorization: Bearer KEY")
        key = find(self._keys(), shown.strip())
        if key is None:
            raise Unauthenticated("the API key is not known here: check it, or ask for another")
        _owner.set(key.name)
        return key

    @contextmanager
    def admitted(self, key: ApiKey) -> Iterator[None]:
        """Counts a request while it is answered, as one session until `count_sessions` says more. Raises
        Overloaded if it is one too many."""
        self.check(key, 1, 1)
        self._requests.labels(key.name).inc()
        admission = _Admission(self, key)
        self.add(admission, 1)
        _admission.set(admission)
        try:
            yield
        finally:
            _admission.set(None)
            self.add(admission, -admission.sessions)

    def add(self, admission: _Admission, sessions: int) -> None:
        admission.sessions += sessions
        self._in_progress.labels(admission.key.name).inc(sessions)
        self._running[admission.key.name] += sessions

    def check(self, key: ApiKey, sessions: int, more: int) -> None:
        """Takes so many more of a request's sessions out of the key's rate. Raises Overloaded or
        InvalidRequest."""
        for most, when in ((key.max_concurrent, "at a time"), (key.requests_per_minute, "a minute")):
            if most is not None and sessions > most:
                raise InvalidRequest(
                    f"the request asks for {sessions} answers, and this API key may have {most} {when}: "
                    "ask for fewer together"
                )
        if key.max_concurrent is not None and self._running[key.name] + more > key.max_concurrent:
            self._refused.labels(key.name, "max-concurrent").inc()
            raise Overloaded(
                f"this API key may have {key.max_concurrent} answers in progress; try "
                "again when one has ended"
            )
        self.check_rate(key, more)

    def check_rate(self, key: ApiKey, more: int) -> None:
        """Takes so many requests out of the key's rate. Raises Overloaded."""
        if key.requests_per_minute is not None:
            # The generic cell rate algorithm: a minute's requests may come at once, then evenly.
            now, each = self._clock(), MINUTE / key.requests_per_minute
            due = max(self._due.get(key.name, now), now) + each * more
            if (wait := due - now - MINUTE) > 1e-9:
                self._refused.labels(key.name, "requests-per-minute").inc()
                seconds = math.ceil(wait)
                raise Overloaded(
                    f"this API key may make {key.requests_per_minute} requests a minute, each prompt "
                    f"counted; try again in {seconds} s",
                    retry_after=seconds,
                )
            self._due[key.name] = due


class HttpAccess:
    """ASGI middleware for every path but the open ones. The application never sees what it refuses."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        try:
            key = self._access.identify(_authorization(scope))
            if not generates(scope):
                await self._app(scope, receive, send)
                return
            with self._access.admitted(key):
                await self._app(scope, receive, send)
        except (Unauthenticated, Overloaded) as error:  # ours: the application answers its own
            self._access.metrics.request_refused(error.kind)
            await refusal(error, scope["path"])(scope, receive, send)


def _authorization(scope: Scope) -> str | None:
    """Returns the header, or what it would be with the key that Anthropic's clients show."""
    headers = Headers(scope=scope)
    key = headers.get("x-api-key")
    return headers.get("authorization", None if key is None else f"Bearer {key}")


def generates(scope: Scope) -> bool:
    """Returns True if limits hold for the request."""
    return bool(scope["method"] == "POST" or scope["path"].endswith("/events"))


class GrpcAccess:
    """Generation behind keys. The context is gRPC's, or one like it that has its metadata and `abort`."""

    def __init__(self, generation: Any, access: Access) -> None:
        self._generation = generation
        self._access = access

    async def Generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        async with aclosing(self._stream(self._generation.Generate, request, context)) as responses:
            async for response in responses:
                yield response

    async def Resume(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        async with aclosing(self._stream(self._generation.Resume, request, context)) as responses:
            async for response in responses:
                yield response

    async def Cancel(self, request: Any, context: Any) -> Any:
        key = await self._identify(context)
        try:
            self._access.check_rate(key, 1)
        except Overloaded as error:
            await self._abort(context, error)
        return await self._generation.Cancel(request, context)

    async def _stream(
        self,
        method: Callable[..., AsyncGenerator[Any, None]],
        request: Any,
        context: Any,
    ) -> AsyncGenerator[Any, None]:
        key = await self._identify(context)
        with ExitStack() as stack:
            try:
                stack.enter_context(self._access.admitted(key))
            except Overloaded as error:
                await self._abort(context, error)
            async with aclosing(method(request, context)) as responses:
                async for response in responses:
                    yield response

    async def _identify(self, context: Any) -> ApiKey:
        try:
            return self._access.identify(dict(context.invocation_metadata() or ()).get("authorization"))
        except Unauthenticated as error:
            await self._abort(context, error)

    async def _abort(self, context: Any, error: Unauthenticated | Overloaded) -> NoReturn:
        later = (("retry-after", str(error.retry_after)),) if isinstance(error, Overloaded) else ()
        self._access.metrics.request_refused(error.kind)
        await context.abort(status(error), error.message, later)
        raise AssertionError("abort raises")


def guarded(generation: Any, access: Access | None) -> Any:
    """Returns the service, behind keys if there are any."""
    return generation if access is None else GrpcAccess(generation, access)
