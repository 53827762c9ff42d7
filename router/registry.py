"""The registry service: the router's store, for workers that do not reach the store themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from outrider.errors import IdInUse, InvalidRequest, PeerRefused
from outrider.net.rpc import caller, check_certified
from outrider.store.store import Registrar
from outrider.v1 import common_pb2, registry_pb2, registry_pb2_grpc
from outrider.wire.codec import record_from_wire
from outrider.wire.hello import Role, check_hello
from router.metrics import Metrics


class Registry(registry_pb2_grpc.RegistryServicer):
    """Converts and delegates."""

    def __init__(self, store: Registrar, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics

    async def Beat(self, request: registry_pb2.Registration, context: Any) -> registry_pb2.BeatReply:
        identity = check_hello(request.info, _role(request.info.hello))
        check_certified(context, frozenset({identity.role}))
        if not request.address:
            raise PeerRefused("address must be the host:port on which the worker serves its own RPCs")
        with self._counted():
            answer = await self._store.beat(record_from_wire(request), caller(context))
        return registry_pb2.BeatReply(
            taken_in_by=answer.taken_in_by, refusal=answer.refusal or "", trouble=answer.trouble or ""
        )

    async def Leave(self, request: registry_pb2.LeaveRequest, context: Any) -> registry_pb2.LeaveReply:
        if not request.HasField("hello"):
            raise InvalidRequest("hello must say who leaves", field="hello")
        identity = check_hello(request, _role(request.hello))
        check_certified(context, frozenset({identity.role}))
        with self._counted():
            await self._store.leave(identity, caller(context))
        return registry_pb2.LeaveReply()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except IdInUse:
            self._metrics.registration_refused("id_in_use")
            raise


def _role(hello: common_pb2.Hello) -> Role:
    """Returns the sender's role, which must be a worker's."""
    return Role.DRAFTER if int(hello.role) == Role.DRAFTER else Role.VERIFIER
