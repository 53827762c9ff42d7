"""A worker as a process: what its signals do, and what ends it."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from outrider.errors import PeerLost, Unavailable, Unhealthy
from outrider.net.rpc import bind, new_server
from outrider.store.memory import MemoryStore
from outrider.store.store import Answer
from outrider.wire.description import ModelInfo, WorkerInfo, WorkerRecord
from outrider.wire.hello import Identity, Role
from outrider.wire.load import VerifierLoad
from outrider.worker import worker as worker_module
from outrider.worker.registration import Registered
from outrider.worker.worker import Worker, serve_until_stopped

LONG = 1000.0  # seconds; no test waits so long


class Busy:
    """A role without a model: it has a session until `idle` is set, and steps until `failure` is."""

    def __init__(self) -> None:
        self.idle = asyncio.Event()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.draining = asyncio.Event()
        self.gave_back = False
        self.parted = False
        self.closed = False

    async def run(self) -> None:
        await self.failure

    def load(self) -> VerifierLoad:
        return VerifierLoad(running=1)

    def stats(self) -> dict[str, float]:
        return {}

    async def probe(self) -> None:
        return

    def drain(self) -> None:
        self.draining.set()

    async def until_idle(self) -> None:
        await self.idle.wait()

    def give_back(self) -> None:
        self.gave_back = True

    async def close_gracefully(self) -> None:
        self.parted = True

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
async def role() -> Busy:
    return Busy()


class Store(MemoryStore):
    """Away once `away` is set; `missed` is set by a beat then."""

    def __init__(self) -> None:
        super().__init__()
        self.away, self.missed = asyncio.Event(), asyncio.Event()

    async def beat(self, record: WorkerRecord) -> Answer:
        if not self.away.is_set():
            return await super().beat(record)
        self.missed.set()
        raise Unavailable("the router does not answer")


def worker_of(role: Busy, store: MemoryStore | None = None) -> Worker:
    model = ModelInfo("m", "print", "Arch", 1, 10, 64, (), "cpu", "float32", True)
    info = WorkerInfo(Identity(Role.VERIFIER, "v", 1, "print", "tokens"), model, 8, 16)
    server = new_server()
    return Worker(info, bind(server, "127.0.0.1", 0), role, server, Registered(store or MemoryStore()))


def serving(role: Busy, drain_seconds: float) -> asyncio.Task[None]:
    return asyncio.create_task(serve_until_stopped(worker_of(role), drain_seconds))


async def terminate(role: Busy) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await role.draining.wait()


async def started(capsys: pytest.CaptureFixture[str]) -> None:
    while "registering" not in capsys.readouterr().out:  # noqa: ASYNC110 (the signals are its own by then)
        await asyncio.sleep(0.01)


async def test_sigterm_lets_it_finish(role: Busy, capsys: pytest.CaptureFixture[str]) -> None:
    task = serving(role, LONG)
    await started(capsys)
    await terminate(role)
    role.idle.set()
    await task
    assert role.closed and role.parted and not role.gave_back


@pytest.mark.parametrize("leaving", [False, True])
async def test_whether_it_is_registered_is_told_unless_it_is_about_to_leave(
    role: Busy, capsys: pytest.CaptureFixture[str], leaving: bool
) -> None:
    store = Store()
    task = asyncio.create_task(serve_until_stopped(worker_of(role, store), LONG))
    await started(capsys)
    if leaving:
        await terminate(role)
    store.away.set()
    await store.missed.wait()
    if not leaving:
        await terminate(role)
    role.idle.set()
    await task
    assert ("the router does not answer" in capsys.readouterr().out) is not leaving


async def test_that_it_is_registered_again_is_told_too(
    role: Busy, capsys: pytest.CaptureFixture[str]
) -> None:
    class Taken(Store):
        async def beat(self, record: WorkerRecord) -> Answer:
            await super().beat(record)
            return Answer(taken_in_by=("router",))

    store = Taken()
    task = asyncio.create_task(serve_until_stopped(worker_of(role, store), LONG))
    said = ""

    async def until(words: str) -> None:
        nonlocal said
        while words not in said:
            said += capsys.readouterr().out
            await asyncio.sleep(0.01)

    await until("verifier ready")
    store.away.set()
    await until("not registered")
    assert "again" not in said.replace("trying again", "")
    store.away.clear()
    await until("registered again")
    await terminate(role)
    role.idle.set()
    await task


async def test_that_it_is_not_registered_is_said_again_with_the_reason(
    role: Busy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "REMIND_SECONDS", 0.02)
    store, said = Store(), ""
    task = asyncio.create_task(serve_until_stopped(worker_of(role, store), LONG))

    async def until(words: str, times: int) -> None:
        nonlocal said
        while said.count(words) < times:
            said += capsys.readouterr().out
            await asyncio.sleep(0.01)

    await until("not registered (no router has answered yet); trying again", 2)
    store.away.set()
    await until("not registered (the router does not answer); trying again", 3)
    await terminate(role)
    role.idle.set()
    await task


async def test_the_ready_line_tells_what_is_wrong_already(
    role: Busy, capsys: pytest.CaptureFixture[str]
) -> None:
    class Taken(Store):
        async def beat(self, record: WorkerRecord) -> Answer:
            await super().beat(record)
            return Answer(taken_in_by=("router",))

    async def trouble() -> str:
        return "no draft of it reaches the verifier"

    worker = worker_of(role, Taken())
    worker.trouble = trouble
    task, said = asyncio.create_task(serve_until_stopped(worker, LONG)), ""
    while "verifier ready" not in said:
        said += capsys.readouterr().out
        await asyncio.sleep(0.01)
    assert said.rstrip().endswith("), but no draft of it reaches the verifier")
    await terminate(role)
    role.idle.set()
    await task


async def test_what_does_not_end_in_time_is_given_back(
    role: Busy, capsys: pytest.CaptureFixture[str]
) -> None:
    task = serving(role, 0.05)
    await started(capsys)
    await terminate(role)
    await task
    assert role.closed and role.gave_back and role.parted


async def test_a_worker_that_was_stopped_is_unhealthy(role: Busy) -> None:
    worker = worker_of(role)
    await worker.start()
    await worker.check(LONG)
    await worker.stop()
    with pytest.raises(Unhealthy, match="it was stopped"):
        await worker.check(LONG)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once(
    role: Busy, capsys: pytest.CaptureFixture[str], second: signal.Signals
) -> None:
    task = serving(role, LONG)
    await started(capsys)
    await terminate(role)
    os.kill(os.getpid(), second)
    await task
    assert role.closed and not role.gave_back


async def test_one_whose_model_fails_while_it_drains_ends_with_the_reason(
    role: Busy, capsys: pytest.CaptureFixture[str]
) -> None:
    task = serving(role, LONG)
    await started(capsys)
    await terminate(role)
    role.failure.set_exception(PeerLost("follower 1 of the tensor-parallel group is gone"))
    with pytest.raises(PeerLost):
        await task
    assert role.closed
