"""A router without sockets or signals: what stands behind its servers, in a process of its own or in Ray."""

from __future__ import annotations

import asyncio
import random
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from outrider.errors import Unavailable
from outrider.net.rpc import STOP_GRACE_SECONDS
from outrider.net.tls import Tls
from outrider.options.telemetry import Export
from outrider.store.logs import SESSION_TTL_SECONDS
from outrider.store.memory import MemoryStore
from outrider.store.store import Store
from outrider.store.url import parse_store_url
from outrider.telemetry.tracing import tracer_of
from outrider.wire.hello import Identity, Role
from router.api.access import Access, HttpAccess
from router.api.compression import Compression
from router.api.http import create_app
from router.api.intake import Intake
from router.api.keys import Keys
from router.api.live import Live, add_live
from router.api.own_site import OwnSite
from router.api.page import add_page
from router.api.reading import AS_THE_TEMPLATE_SAYS, Formats
from router.api.request_id import RequestIds
from router.api.threads import Threads
from router.api.validation import DrawBelow
from router.fleet import Fleet
from router.live import service, sessions_of
from router.metrics import Metrics
from router.prompt_record import PromptRecord
from router.session_log_writer import SessionLogWriter
from router.sessions import Sessions
from router.spans_dropped import SpansDropped
from router.worker_discovery import WorkerDiscovery

NO_EXPORT = Export()
FLUSH_SECONDS = 2.0  # a router that stops gives its sessions' logs so long to be written


class Router:
    """Everything is made here and wired up; `start` and `stop` run it. Belongs to one event loop."""

    def __init__(
        self,
        store: Store,
        *,
        num_speculative_tokens: int,
        max_sessions: int,
        session_ttl: float = SESSION_TTL_SECONDS,
        seed: int | None = None,
        lock_step: bool = False,
        drafters_per_session: int = 1,
        same_numerics: bool = False,
        share_prefixes: bool = False,
        formats: Formats = AS_THE_TEMPLATE_SAYS,
        cors_origins: Sequence[str] = (),
        page: bool = True,
        keys: Keys | None = None,
        tls: Tls | None = None,
        export: Export = NO_EXPORT,
        record: Path | None = None,
    ) -> None:
        """The options are RouterConfig's. The store is closed with the router. `keys`: of which clients must
        show one. `tls`: for the connections to workers. Raises StartupError."""
        self.record = None if record is None else PromptRecord(record)
        self.store = store
        self._session_ttl = session_ttl
        self.identity = _identity()
        self.metrics = Metrics()
        self.tracer = tracer_of(export, self.identity)
        if self.tracer is not None:
            self.metrics.registry.register(SpansDropped(self.tracer))
            self.tracer.send_metrics(self.metrics.registry)
        self.fleet = Fleet(self.metrics, clock=time.monotonic)
        self.threads = Threads()
        self.log_writer = SessionLogWriter(
            store.logs,
            self.identity.worker_id,
            self.metrics,
            session_ttl,
            decoding=self.threads.of_logs,
        )
        self.sessions = Sessions(
            self.fleet,
            self.log_writer,
            max_sessions=max_sessions,
            num_speculative_tokens=num_speculative_tokens,
            lock_step=lock_step,
            drafters_per_session=drafters_per_session,
            same_numerics=same_numerics,
            tracer=self.tracer,
            record=self.record,
        )
        self.intake = Intake(
            self.sessions, _draw_below(seed), self.threads, share_prefixes=share_prefixes, formats=formats
        )
        self.app: FastAPI = create_app(self.intake, self.metrics)
        self.live = Live(
            lambda: service(self.fleet, self.sessions.open),
            lambda owner: sessions_of(owner, self.sessions.open),
        )
        add_live(self.app, self.live, self.metrics)
        if page:
            add_page(self.app)
        self.access = None if keys is None else Access(keys, self.metrics)
        if self.access is not None:
            self.app.add_middleware(HttpAccess, access=self.access)
        else:
            self.app.add_middleware(OwnSite, origins=cors_origins)
        if cors_origins:
            self.app.add_middleware(
                CORSMiddleware,
                allow_origins=cors_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["*"],
            )
        self.app.add_middleware(Compression)
        self.app.add_middleware(RequestIds, tracer=self.tracer)  # the last one added is asked first
        self.discovery = WorkerDiscovery(store, self.fleet, self.identity, tls=tls)
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        """Begins to look for workers. Raises StartupError if the store is there but refuses."""
        with suppress(Unavailable):
            await self.store.logs.append((), self._session_ttl)  # one that is away is waited for
        self._tasks = [
            asyncio.create_task(running) for running in (self.discovery.run(), self.log_writer.run())
        ]

    async def wait(self) -> None:
        """Waits until the router cannot go on, and raises why."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def stop(self, grace_seconds: float = STOP_GRACE_SECONDS) -> None:
        """Gives the sessions in progress a moment, ends them, and lets go of workers and store."""
        self.live.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await self.sessions.until_idle()
        self.sessions.stop()
        if not self.log_writer.degraded:
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_SECONDS):
                    await self.log_writer.flush()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.store.close()
        if self.tracer is not None:
            self.tracer.close()
        if self.record is not None:
            self.record.close()


def store_at(url: str | None) -> Store:
    """Returns the store with that url, or one in this process. Connects to nothing yet. Raises
    StartupError."""
    if url is None:
        return MemoryStore()
    from outrider.store.redis import RedisStore  # its client takes a tenth of a second of every start

    return RedisStore(parse_store_url(url))


def _identity() -> Identity:
    incarnation = secrets.randbits(64)
    return Identity(Role.ROUTER, f"router-{socket.gethostname()}-{incarnation:016x}", incarnation)


def _draw_below(seed: int | None) -> DrawBelow:
    """Draws seeds for requests that bring none."""
    return secrets.randbelow if seed is None else random.Random(seed).randrange
