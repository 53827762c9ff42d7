"""A worker's side of the registry: it makes itself known to a router and stays known."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from typing import NoReturn

import grpc
import grpc.aio

from outrider.errors import PeerRefused
from outrider.rpc import Identity, Role, channel, check_hello
from outrider.v1 import registry_pb2, registry_pb2_grpc
from outrider.wire.codec import worker_info_to_wire
from outrider.wire.description import WorkerInfo

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
FIRST_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 2.0

OnState = Callable[[Identity | None, str], None]
"""Called with the router's identity when the worker is taken in; with None and the reason when it is not."""


async def register(
    router_address: str,
    info: WorkerInfo,
    address: str,
    *,
    on_state: OnState | None = None,
    jitter: Callable[[], float] = random.random,
) -> NoReturn:
    """Keeps the worker registered at the router for as long as the task runs; cancel it to leave.

    `address` is the host:port of the worker's own server, which must be listening already: the router calls
    back. A router that is absent or restarts is tried again, with a pause that doubles up to two seconds.
    Raises PeerRefused with the router's sentence where the worker does not fit the service.
    """
    backoff = FIRST_BACKOFF_SECONDS
    async with channel(router_address) as router:
        stub = registry_pb2_grpc.RegistryStub(router)
        while True:
            call = stub.Register(_messages(info, address))
            try:
                async for reply in call:  # one reply; then the stream is held open
                    taken_in_by = check_hello(reply, Role.ROUTER)
                    backoff = FIRST_BACKOFF_SECONDS
                    log.info("registered at router %s", taken_in_by.worker_id)
                    _tell(on_state, taken_in_by, "registered")
                reason = "the router ended the registration"
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    raise PeerRefused(error.details() or "the router refused this worker") from None
                reason = f"{error.code().name}: {error.details()}"
            finally:
                call.cancel()
            log.warning("not registered: %s; trying again", reason)
            _tell(on_state, None, reason)
            await asyncio.sleep(backoff * (0.5 + jitter() / 2))
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)


async def _messages(info: WorkerInfo, address: str) -> AsyncIterator[registry_pb2.Registration]:
    yield registry_pb2.Registration(info=worker_info_to_wire(info), address=address)
    while True:
        await asyncio.sleep(HEARTBEAT_SECONDS)
        yield registry_pb2.Registration()


def _tell(on_state: OnState | None, router: Identity | None, reason: str) -> None:
    if on_state is not None:
        on_state(router, reason)
