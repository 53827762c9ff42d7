"""The store of an application that has no Redis: one small deployment, and how everybody else reaches it.

Only registrations and what routers remember pass through it, once a second each: never tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, cast

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from outrider.errors import Unavailable
from outrider.store.memory import MemoryStore
from outrider.store.memory_logs import MemorySessionLogs
from outrider.store.store import TTL_SECONDS, Answer, Store, WorkerRecord
from outrider.wire.hello import Identity, WorkerKey
from router.router import store_at

POLL_SECONDS = 10.0  # after which a watcher that heard of no change asks again
ANSWER_SECONDS = 3.0  # a registry that has not answered by then is away
AWAY_SECONDS = 0.5  # between two tries while the registry is away

Handle = DeploymentHandle[Any]
StoreSource = Handle | str  # the Registry deployment, or a url
Seen = tuple[str, int]  # which registry said something, and the number of what it said


class Registry:
    """The deployment: a MemoryStore that is asked by its handle."""

    def __init__(self) -> None:
        self._store = MemoryStore()
        self._life = secrets.token_hex(8)
        self._born = time.monotonic()
        self._number = 0
        self._changed = asyncio.Condition()
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        async for _ in self._store.workers():
            async with self._changed:
                self._number += 1
                self._changed.notify_all()

    async def beat(self, record: WorkerRecord, caller: str) -> Answer:
        return await self._store.beat(record, caller)

    async def leave(self, identity: Identity, caller: str) -> None:
        await self._store.leave(identity, caller)

    async def answer(
        self, identity: Identity, router_id: str, refusal: str | None, trouble: str | None
    ) -> None:
        await self._store.answer(identity, router_id, refusal, trouble)

    async def workers(self, seen: Seen | None) -> tuple[Seen, Mapping[WorkerKey, WorkerRecord]]:
        """Returns the live records, once they differ from those `seen`, or after POLL_SECONDS."""
        if seen is not None and seen[0] != self._life:
            # The asker knows workers of the registry that was here before: each has time to beat here first.
            await asyncio.sleep(max(0.0, self._born + TTL_SECONDS - time.monotonic()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_SECONDS), self._changed:
                await self._changed.wait_for(lambda: self._number > 0 and seen != (self._life, self._number))
        return (self._life, self._number), await self.present()

    async def present(self) -> Mapping[WorkerKey, WorkerRecord]:
        """Returns the live records, with their loads as of the last beat."""
        return await present(self._store)


class RegistryStore:
    """Implements Store: the Registry deployment by its handle."""

    def __init__(self, registry: Handle) -> None:
        self._registry = registry
        self.logs = MemorySessionLogs()  # of this process: tokens do not pass through the registry

    async def beat(self, record: WorkerRecord, caller: str = "") -> Answer:
        async with _answering():
            return await self._registry.beat.remote(record, caller)  # type: ignore[no-any-return]

    async def leave(self, identity: Identity, caller: str = "") -> None:
        async with _answering():
            await self._registry.leave.remote(identity, caller)

    async def close(self) -> None:
        """Does nothing: the handle is Ray's."""

    async def workers(self) -> AsyncIterator[Mapping[WorkerKey, WorkerRecord]]:
        seen: Seen | None = None
        while True:
            try:
                async with _answering(POLL_SECONDS + TTL_SECONDS + ANSWER_SECONDS):
                    now, workers = await self._registry.workers.remote(seen)
            except Unavailable:
                await asyncio.sleep(AWAY_SECONDS)
                continue
            if now != seen:
                seen = now
                yield workers

    async def answer(
        self, identity: Identity, router_id: str, refusal: str | None, trouble: str | None = None
    ) -> None:
        async with _answering():
            await self._registry.answer.remote(identity, router_id, refusal, trouble)


@contextlib.asynccontextmanager
async def _answering(seconds: float = ANSWER_SECONDS) -> AsyncIterator[None]:
    """Raises Unavailable: a handle waits for ever for a deployment that is gone."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except (TimeoutError, RayError, RayServeException):
        raise Unavailable("the registry does not answer") from None


async def present(store: Store) -> Mapping[WorkerKey, WorkerRecord]:
    """Returns the live records, with their loads as of the last beat."""
    async with aclosing(
        cast(AsyncGenerator[Mapping[WorkerKey, WorkerRecord], None], store.workers())
    ) as said:
        return await anext(said)


def open_store(source: StoreSource) -> Store:
    """Connects to nothing yet. Raises StartupError if a url is wrong."""
    return store_at(source) if isinstance(source, str) else RegistryStore(source)
