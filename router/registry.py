"""The registry service: the router's store, for workers that do not reach the store themselves.

Workers are not trusted. What one host registers is bounded before it is decoded; more is refused with a
sentence and counted. A live worker belongs to the certificate that registered it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio

from outrider.errors import IdInUse, Overloaded
from outrider.net.places import host_of
from outrider.net.rpc import add_methods, caller, check_certified
from outrider.store.store import Answer, Registrar, WorkerRecord
from outrider.wire.hello import Identity
from outrider.wire.methods import BEAT, LEAVE
from router.metrics import Metrics
from router.registration_limits import RegistrationLimits


class Registry:
    """Checks and delegates."""

    def __init__(
        self, store: Registrar, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` gives seconds."""
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._limits = RegistrationLimits()

    def add_to(self, server: grpc.aio.Server) -> None:
        add_methods(server, {BEAT: self.beat, LEAVE: self.leave}, self._admit)

    def _admit(self, context: Any, size: int) -> None:
        with self._counted():
            self._limits.word(_host(context), size, self._clock())

    async def beat(self, record: WorkerRecord, context: Any) -> Answer:
        identity = record.info.identity
        check_certified(context, frozenset({identity.role}))
        with self._counted():
            description = hash((record.info, record.address))
            self._limits.worker(_host(context), identity.key, description, self._clock())
            return await self._store.beat(record, caller(context))

    async def leave(self, identity: Identity, context: Any) -> None:
        check_certified(context, frozenset({identity.role}))
        with self._counted():
            await self._store.leave(identity, caller(context))
        self._limits.left(_host(context), identity.key)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except IdInUse:
            self._metrics.registration_refused("id_in_use")
            raise
        except Overloaded:
            self._metrics.registration_refused("too_many")
            raise


def _host(context: Any) -> str:
    return f"{caller(context)} {host_of(context.peer())}"
