"""A worker's life, whatever process it lives in: it listens, registers, serves, drains and leaves."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, NoReturn, Protocol

import grpc.aio

from outrider.errors import OutriderError, StepHung, Unhealthy, printable
from outrider.log_record import MAX_LINE
from outrider.net.crowding import limit_connections
from outrider.net.rpc import STOP_GRACE_SECONDS, most_connections
from outrider.net.tasks import cancel, first_of
from outrider.store.store import WorkerRecord
from outrider.wire.description import WorkerInfo
from outrider.wire.load import Load
from outrider.worker.garbage import spare_what_is_there
from outrider.worker.registration import OnState
from outrider.worker.stepwatch import end_process, loop_watched

JOIN_SHARE = 8  # one in so many descriptors is for connections of drafters that joined
REMIND_SECONDS = 60.0  # after which it says again that it is not registered
PARTING_SECONDS = 2.0  # that routers are given to hear the last words


class Service(Protocol):
    """What a role does for the worker around it."""

    def run(self) -> Coroutine[Any, Any, None]:
        """Steps until it fails; raises why."""
        ...

    def load(self) -> Load: ...
    def stats(self) -> dict[str, float]:
        """Returns the figures that autoscaling goes by."""
        ...

    async def probe(self) -> None:
        """Runs a one-token forward. Raises if the model does not run."""
        ...

    def drain(self) -> None:
        """Takes no new sessions from now on."""
        ...

    async def until_idle(self) -> None:
        """Returns once the worker has no session."""
        ...

    def give_back(self) -> None:
        """Ends the sessions that it still has; they go on elsewhere."""
        ...

    async def close_gracefully(self) -> None:
        """Gives back the sessions that it still has and ends the streams. The routers have heard everything
        once this returns."""
        ...

    async def close(self) -> None: ...


class Membership(Protocol):
    """How a worker is known to routers."""

    async def keep(self, describe: Callable[[], WorkerRecord], on_state: OnState | None) -> NoReturn:
        """Keeps it known for as long as this runs. `describe` returns the record as it is now. Raises
        PeerRefused with a router's sentence if it does not fit."""
        ...

    async def close(self) -> None: ...


class Worker:
    """A drafter or verifier that listens already and has its model loaded. `start` makes it known."""

    def __init__(
        self,
        info: WorkerInfo,
        address: str,
        service: Service,
        server: grpc.aio.Server,
        membership: Membership,
        join_address: str = "",
        join_server: grpc.aio.Server | None = None,
        note: str = "",
        trouble: Callable[[], Coroutine[Any, Any, str]] | None = None,
    ) -> None:
        """`address` is the host:port of `server` as other machines reach it. `join_address`: where drafters
        that joined reach a verifier, at `join_server` if it is another one; empty = they do not. `note` is
        said when it is ready, and so is `trouble`: why it is of no use though it is registered; empty =
        it is of use."""
        self.info = info
        self.address = address
        self.note = note
        self.trouble = trouble
        self._join_address = join_address
        self._service = service
        self._servers = [server] if join_server is None else [server, join_server]
        self._membership = membership
        self._tasks: list[asyncio.Task[Any]] = []  # the steps, the registration, ...

    async def start(self, on_state: OnState | None = None) -> None:
        """Serves, and registers. `on_state` hears when a router has taken the worker in, and when none
        has."""
        for server in self._servers:
            await server.start()
        ports = {_port(self.address): most_connections()}
        if len(self._servers) > 1:
            ports[_port(self._join_address)] = most_connections(JOIN_SHARE)
        self._tasks = [
            asyncio.create_task(self._service.run()),
            asyncio.create_task(self._membership.keep(self._record, on_state)),
            asyncio.create_task(limit_connections(ports)),
        ]

    async def wait(self) -> None:
        """Returns or raises when the worker cannot go on: PeerRefused with a router's sentence if it does
        not fit, or what the model's steps raised."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def check(self, seconds: float) -> None:
        """Shows within so many seconds that a token goes through the worker's model. Raises Unhealthy."""
        for task in self._tasks:
            if task.done():
                why = "it was stopped" if task.cancelled() else task.exception()
                raise Unhealthy(f"the worker has ended: {why}")
        try:
            async with asyncio.timeout(seconds):
                await self._service.probe()
        except TimeoutError:
            raise Unhealthy(f"no token went through the model within {seconds:g} seconds") from None
        except OutriderError as error:
            raise Unhealthy(error.message) from error

    def stats(self) -> dict[str, float]:
        return self._service.stats()

    async def drain(self, seconds: float) -> None:
        """Finishes the sessions that it has, for at most so many seconds. The rest goes on elsewhere."""
        self._service.drain()
        try:
            async with asyncio.timeout(seconds):
                await self._service.until_idle()
        except TimeoutError:
            self._service.give_back()

    async def stop(self) -> None:
        """Leaves the routers first, so that all hear its last words, then the registry."""
        with suppress(TimeoutError):  # of a router that does not read
            async with asyncio.timeout(PARTING_SECONDS):
                await self._service.close_gracefully()
        await cancel(self._tasks[1:])
        await asyncio.gather(*(server.stop(STOP_GRACE_SECONDS) for server in self._servers))
        await cancel(self._tasks[:1])
        await self._service.close()
        await self._membership.close()

    def _record(self) -> WorkerRecord:
        return WorkerRecord(self.info, self.address, self._service.load(), self._join_address)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


async def serve_until_stopped(worker: Worker, drain_seconds: float = 0.0) -> None:
    """Serves, as a process of its own, until a signal.

    SIGTERM drains first, for at most so many seconds. SIGINT, or a second SIGTERM, does not. Prints the ready
    line once a router has taken the worker in. Raises what Worker.wait raises. StepHung ends the process with
    exit code 1 instead, and so does an event loop that stands still.
    """
    role = worker.info.identity.role.name.lower()
    with loop_watched(role):
        await _serve_until_stopped(worker, role, drain_seconds)


async def _serve_until_stopped(worker: Worker, role: str, drain_seconds: float) -> None:
    drain, stop = asyncio.Event(), asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if number is signal.SIGINT or drain.is_set():
            stop.set()
        drain.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    announced = missing = False
    why = "no router has answered yet"  # it is not registered; empty = it is
    announcing: asyncio.Task[None] | None = None

    async def announce() -> None:
        trouble = "" if worker.trouble is None else await worker.trouble()
        say(ready_line(worker.info, worker.address, worker.note, trouble))

    async def remind() -> NoReturn:
        while True:
            await asyncio.sleep(REMIND_SECONDS)
            if why and not drain.is_set():
                say(f"outrider {role}: not registered ({why}); trying again")

    def on_state(taken_in_by: str | None, reason: str) -> None:
        nonlocal announced, missing, why, announcing
        why = reason if taken_in_by is None else ""
        if drain.is_set():
            return  # nobody waits for it to be registered, and the router may be leaving, too
        if taken_in_by is None:
            say(f"outrider {role}: not registered ({reason}); trying again")
        elif not announced:
            announced = True
            spare_what_is_there()
            announcing = asyncio.create_task(announce())
        elif missing:
            say(f"outrider {role}: registered again")
        missing = taken_in_by is None

    say(f"outrider {role}: listening on {worker.address}, registering")
    await worker.start(on_state)
    reminding = asyncio.create_task(remind())
    waits = [asyncio.create_task(wait) for wait in (worker.wait(), drain.wait())]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        if not stop.is_set():
            await first_of(worker.drain(drain_seconds), stop.wait(), worker.wait())
    except StepHung as hung:
        await worker.stop()
        end_process(f"outrider {role}: {hung.message}")
    finally:
        await cancel([*waits, reminding, *([] if announcing is None else [announcing])])
        await worker.stop()


def say(line: str) -> None:
    """Prints a line for the person (or supervisor) who started the process."""
    print(printable(line, MAX_LINE), flush=True)


def ready_line(info: WorkerInfo, address: str, note: str, trouble: str = "") -> str:
    """Returns what a worker says of itself once a router has taken it in; `note`: what else there is to
    say; `trouble`: why it is of no use yet."""
    model, but = info.model, trouble and f", but {trouble}"
    ready = f"outrider {info.identity.role.name.lower()} ready: {address}"
    if not model.parameters:
        return f"{ready} ({model.name}, without a model){but}"
    exact = "bit-exact" if model.bit_exact else "not bit-exact"
    size = f"{model.parameters / 1e6:.1f} M parameters"
    return (
        f"{ready} (model {model.name}, {size}, {model.device} {model.quantization or model.dtype}, {exact}, "
        f"numerics {model.numerics}{note and f', {note}'}){but}"
    )
