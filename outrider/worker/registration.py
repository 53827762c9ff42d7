"""A worker's side of the registry. The worker makes itself known and stays known."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import grpc
import grpc.aio

from outrider.errors import IdInUse, OutriderError, Overloaded, PeerRefused, StartupError, Unavailable
from outrider.net.diagnosis import why_unreachable
from outrider.net.rpc import ask, channel
from outrider.net.tasks import propagate_cancel
from outrider.net.tls import Tls
from outrider.store.logs import SESSION_TTL_SECONDS, SessionLogs
from outrider.store.store import Answer, Registrar
from outrider.store.url import parse_store_url
from outrider.wire.description import WorkerRecord
from outrider.wire.hello import Identity
from outrider.wire.methods import BEAT, LEAVE

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0  # between beats, once a router has taken the worker in
FIRST_BEAT_SECONDS = 0.1  # and between the first ones; the pause grows up to BEAT_SECONDS
GROWTH = 1.25
ANSWER_SECONDS = 3.0  # a store or router that has not answered a beat by then is away
LEAVE_SECONDS = 1.0

REFUSALS: dict[grpc.StatusCode, type[OutriderError]] = {  # what a router that is there may answer
    grpc.StatusCode.FAILED_PRECONDITION: PeerRefused,
    grpc.StatusCode.ALREADY_EXISTS: IdInUse,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
}

OnState = Callable[[str | None, str], None]
"""Called with a router's id when it takes the worker in; with None and the reason while none has."""


async def register(
    registrar: Registrar,
    describe: Callable[[], WorkerRecord],
    *,
    on_state: OnState | None = None,
    jitter: Callable[[], float] = random.random,
) -> NoReturn:
    """Keeps the worker registered for as long as the task runs. Cancel it to leave.

    `describe` returns the record as it is now. The worker's own server must be listening already, because
    routers call back. If the store is away, it is tried again for ever. `on_state` hears of changes only.
    Raises PeerRefused with the router's sentence if the worker does not fit the service.
    """
    state: tuple[str | None, str] | None = None
    pause = FIRST_BEAT_SECONDS
    try:
        while True:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    answer = await propagate_cancel(registrar.beat(describe()))
                now = _state(answer)
            except TimeoutError:
                now = None, "no answer"
            except (Unavailable, IdInUse) as error:
                now = None, error.message
            if now is not None and now != state:
                taken_in_by, reason = state = now
                if taken_in_by is None:
                    log.info("not registered: %s; trying again", reason)
                    pause = FIRST_BEAT_SECONDS
                if on_state is not None:
                    on_state(taken_in_by, reason)
            if state is not None and state[0] is not None:
                pause = BEAT_SECONDS
            await asyncio.sleep(pause * (0.75 + jitter() / 4))
            pause = min(GROWTH * pause, BEAT_SECONDS)
    finally:
        with suppress(OutriderError, TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                await registrar.leave(describe().info.identity)


class Registered:
    """A worker's membership by registration: others call it."""

    def __init__(self, registrar: Registrar) -> None:
        self._registrar = registrar

    async def keep(self, describe: Callable[[], WorkerRecord], on_state: OnState | None) -> NoReturn:
        await register(self._registrar, describe, on_state=on_state)

    async def close(self) -> None:
        await self._registrar.close()


def _state(answer: Answer) -> tuple[str | None, str] | None:
    """Returns what on_state hears, or None if no router has said anything yet. Raises PeerRefused."""
    if answer.refusal is not None:
        raise PeerRefused(answer.refusal)
    if answer.taken_in_by:
        return answer.taken_in_by[0], "registered"
    return None if answer.trouble is None else (None, answer.trouble)


class RouterRegistrar:
    """Implements Registrar by the registry that a router serves, which stands for that router's store."""

    def __init__(self, address: str, tls: Tls | None = None) -> None:
        """`address` is the host:port at which the router takes workers in."""
        self._address = address
        self._tls = tls
        self._channel = channel(address, tls)

    async def beat(self, record: WorkerRecord, caller: str = "") -> Answer:
        """`caller` is what our certificate says."""
        try:
            return await ask(self._channel, BEAT, record, ANSWER_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                return Answer(refusal=error.details() or "the router refused this worker")
            if error.code() in REFUSALS:
                return Answer(trouble=error.details())
            away = await self._away(error)
            await self._reopen()
            raise away from None

    async def leave(self, identity: Identity, caller: str = "") -> None:
        try:
            await ask(self._channel, LEAVE, identity, LEAVE_SECONDS)
        except grpc.aio.AioRpcError as error:
            refused = REFUSALS.get(error.code())
            if refused is not None:
                raise refused(error.details() or "the router refused this worker") from None
            raise await self._away(error) from None

    async def _away(self, error: grpc.aio.AioRpcError) -> Unavailable:
        """Returns an error that says why no answer came."""
        why = ""
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            why = await why_unreachable(self._address, self._tls)
        return Unavailable(f"the router does not answer ({why or error.code().name})")

    async def _reopen(self) -> None:
        """Makes the channel anew. A channel keeps its first certificate, and that may have been renewed
        since."""
        if self._tls is not None:
            await self._channel.close(None)
            self._channel = channel(self._address, self._tls)

    async def close(self) -> None:
        await self._channel.close(None)


async def check_admitted(registrar: Registrar) -> None:
    """Raises StartupError if the store is there but refuses, because of its password for instance. To be
    called before a model is loaded. An absent store, or a router, is waited for later."""
    logs: SessionLogs | None = getattr(registrar, "logs", None)  # a store has them
    if logs is not None:
        with suppress(Unavailable):
            await logs.append((), SESSION_TTL_SECONDS)


def registrar_at(router: str | None, store: str | None, tls: Tls | None = None) -> Registrar:
    """Returns where a worker registers: the router with that host:port, or the store with that url.

    It connects to nothing yet. Raises StartupError unless exactly one of them is given.
    """
    if (router is None) == (store is None):
        raise StartupError("say with --router or with --store where to register: one of them, not both")
    if router is not None:
        return RouterRegistrar(router, tls)
    assert store is not None
    from outrider.store.redis import RedisStore  # its client takes a tenth of a second of every start

    return RedisStore(parse_store_url(store))
