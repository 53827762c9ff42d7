"""The registry service: takes workers in, and out when they are gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from outrider.errors import PeerRefused, Unavailable
from outrider.rpc import Identity, Role, channel, check_hello
from outrider.v1 import registry_pb2, registry_pb2_grpc
from outrider.wire.codec import worker_info_from_wire
from outrider.wire.description import WorkerInfo
from router.fit import FirstDifference, Registration, misfit
from router.fleet import Fleet
from router.workers import Drafter, Verifier, fetch_tokenizer

log = logging.getLogger(__name__)

SILENCE_SECONDS = 5.0  # a worker that sends no heartbeat for this long is gone

Requests = AsyncIterator[registry_pb2.Registration]
Context = grpc.aio.ServicerContext[registry_pb2.Registration, registry_pb2.RegistrationReply]


class Registry(registry_pb2_grpc.RegistryServicer):
    """One call of Register is the whole life of a worker here: what it opens, it closes."""

    def __init__(
        self,
        fleet: Fleet,
        router: Identity,
        first_difference: FirstDifference,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._first_difference = first_difference
        self._silence_seconds = silence_seconds

    async def Register(self, request_iterator: Requests, context: Context) -> None:
        requests = aiter(request_iterator)
        info, address = await self._description(requests)
        async with channel(address) as worker_channel:
            tokenizer = await fetch_tokenizer(worker_channel, info.identity)
            registration = Registration(info, address, tokenizer)
            worker: Verifier | Drafter
            if info.identity.role is Role.VERIFIER:
                worker = Verifier(registration, worker_channel)
            else:
                worker = Drafter(registration, worker_channel)
            try:
                await worker.connect(self._router)
                self._admit(worker)
                await self._until_gone(worker, requests, context)
            finally:
                self._dismiss(worker)

    async def _description(self, requests: Requests) -> tuple[WorkerInfo, str]:
        try:
            async with asyncio.timeout(self._silence_seconds):
                first = await anext(requests)
        except (TimeoutError, StopAsyncIteration):
            raise PeerRefused("the first message of a registration must describe the worker") from None
        hello = first.info.hello
        role = Role.DRAFTER if int(hello.role) == Role.DRAFTER else Role.VERIFIER
        check_hello(first.info, role)
        if not first.address:
            raise PeerRefused("address must be the host:port on which the worker serves its own RPCs")
        return worker_info_from_wire(first.info), first.address

    def _admit(self, worker: Verifier | Drafter) -> None:
        """Checks and adds in one go: nothing can join in between."""
        served = [one.registration for one in self._fleet.verifiers.values()]
        sentence = misfit(worker.registration, served, self._first_difference)
        if sentence is not None:
            raise PeerRefused(sentence)
        self._make_room(worker)
        if isinstance(worker, Drafter):
            self._fleet.add_drafter(worker)
            if served:
                worker.verdict.set_result(None)
            return
        self._fleet.add_verifier(worker)
        worker.verdict.set_result(None)
        for drafter in self._fleet.drafters.values():
            if not drafter.verdict.done():  # it came before there was a target to compare it with
                drafter.verdict.set_result(
                    misfit(drafter.registration, [worker.registration], self._first_difference)
                )

    def _make_room(self, worker: Verifier | Drafter) -> None:
        """A process that registers again replaces its own former registration, and nobody else's."""
        former = self._fleet.get(worker.registration.worker_id)
        if former is None:
            return
        if former.identity.incarnation != worker.identity.incarnation:
            raise Unavailable(
                f"another process is registered as {worker.registration.worker_id!r}; "
                "if it is not about to go, give each worker its own worker id"
            )
        self._dismiss(former)

    def _dismiss(self, worker: Verifier | Drafter) -> None:
        worker.hang_up()
        if self._fleet.remove(worker):
            log.info("%s %s left", worker.identity.role.name.lower(), worker.registration.worker_id)

    async def _until_gone(self, worker: Verifier | Drafter, requests: Requests, context: Context) -> None:
        """Returns when the worker ends its registration; raises where it is lost or does not fit."""
        verdict = asyncio.create_task(self._tell_verdict(worker, context))
        heartbeats = asyncio.create_task(self._heartbeats(requests))
        events = asyncio.create_task(worker.listen())
        try:
            done, _ = await asyncio.wait((verdict, heartbeats, events), return_when=asyncio.FIRST_COMPLETED)
            if done == {verdict}:
                verdict.result()
                await asyncio.wait((heartbeats, events), return_when=asyncio.FIRST_COMPLETED)
            if heartbeats.done():
                heartbeats.result()
                return
            if not events.cancelled():
                events.result()
            raise Unavailable("the stream between the router and the worker broke off")
        finally:
            for task in (verdict, heartbeats, events):
                task.cancel()
            await asyncio.gather(verdict, heartbeats, events, return_exceptions=True)

    async def _tell_verdict(self, worker: Verifier | Drafter, context: Context) -> None:
        """Takes the worker in, or raises PeerRefused: a drafter once there is a target to compare it with."""
        sentence = await worker.verdict
        if sentence is not None:
            raise PeerRefused(sentence)
        log.info("%s %s joined", worker.identity.role.name.lower(), worker.registration.worker_id)
        await context.write(registry_pb2.RegistrationReply(hello=self._router.hello()))

    async def _heartbeats(self, requests: Requests) -> None:
        """Returns when the worker ends the stream; raises Unavailable when it falls silent."""
        try:
            async with asyncio.timeout(self._silence_seconds) as silence:
                async for _ in requests:
                    silence.reschedule(asyncio.get_running_loop().time() + self._silence_seconds)
        except TimeoutError:
            raise Unavailable(f"no heartbeat for {self._silence_seconds:g} seconds") from None
