"""The registry service: the router's store, for workers that do not reach the store themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio

from outrider.errors import IdInUse, PeerRefused
from outrider.net.rpc import add_methods, caller, check_certified
from outrider.store.store import Answer, Registrar, WorkerRecord
from outrider.wire.hello import Identity
from outrider.wire.methods import BEAT, LEAVE
from router.metrics import Metrics


class Registry:
    """Checks and delegates."""

    def __init__(self, store: Registrar, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics

    def add_to(self, server: grpc.aio.Server) -> None:
        add_methods(server, {BEAT: self.beat, LEAVE: self.leave})

    async def beat(self, record: WorkerRecord, context: Any) -> Answer:
        check_certified(context, frozenset({record.info.identity.role}))
        if not record.address:
            raise PeerRefused("address must be the host:port on which the worker serves its own RPCs")
        with self._counted():
            return await self._store.beat(record, caller(context))

    async def leave(self, identity: Identity, context: Any) -> None:
        check_certified(context, frozenset({identity.role}))
        with self._counted():
            await self._store.leave(identity, caller(context))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except IdInUse:
            self._metrics.registration_refused("id_in_use")
            raise
