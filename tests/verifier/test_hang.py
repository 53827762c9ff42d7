"""A step that does not end: its sessions go elsewhere at once, and nobody new is let in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.errors import StepHung, Unavailable
from outrider.v1 import verifier_pb2
from outrider.wire.hello import Role
from outrider.worker.stepwatch import under_way
from tests.verifier.talk import Running, Talk, drafter, hello, open_session, output, router
from verifier import stepper as stepper_module


@pytest.fixture
def hang(verifier: Running, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets the steps hang from now on, until `go_on` is set."""
    engine = verifier.stepper._engine
    choose = engine.choose

    class Hang:
        go_on = threading.Event()
        hangs = threading.Event()

        def __call__(self) -> None:
            def wait(*work: Any) -> list[int]:
                self.hangs.set()
                self.go_on.wait()
                return choose(*work)

            monkeypatch.setattr(engine, "choose", wait)

    one = Hang()
    yield one
    one.go_on.set()


@pytest.fixture(autouse=True)
async def watch(verifier: Running, impatient: Any) -> AsyncIterator[asyncio.Task[Any]]:
    watching = asyncio.create_task(verifier.service._watch())
    yield watching
    watching.cancel()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Steps are overdue after so many seconds."""

    def set_to(seconds: float) -> None:
        monkeypatch.setattr("outrider.worker.stepwatch.UNKNOWN_SECONDS", seconds)

    set_to(0.5)
    return set_to


async def until_turned_away(talk: Talk) -> str:
    """Hears the stream out, to the sentence with which it ends."""
    async with asyncio.timeout(120):
        with pytest.raises(grpc.aio.AioRpcError):
            while await talk.call.read() is not grpc.aio.EOF:
                pass
        assert await talk.call.code() is grpc.StatusCode.UNAVAILABLE
        return str(await talk.call.details())


async def stranger(verifier: Running) -> Talk:
    talk = Talk.start(verifier.stub.Sessions)
    talk.say(verifier_pb2.VerifierCommand(hello=hello(Role.ROUTER)))
    return talk


async def test_its_routers_lose_the_worker_and_nobody_is_let_in_until_the_step_ends(
    verifier: Running, hang: Any, impatient: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.worker.stepwatch.TIMES_OVERDUE", 1000.0)
    talk, idle = await router(verifier), await router(verifier)
    talk.say(open_session(b"s" * 16, max_tokens=900))
    assert (await talk.hear()).committed
    hang()
    assert "does not end" in await until_turned_away(talk)
    assert "does not end" in await until_turned_away(idle)
    assert verifier.stepper.get(b"s" * 16) is None  # nor an orphan
    assert "does not end" in await until_turned_away(await stranger(verifier))
    health = health_pb2_grpc.HealthStub(verifier.connection)
    asked = health_pb2.HealthCheckRequest()
    assert (await health.Check(asked)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    hang.go_on.set()
    impatient(30.0)
    async with asyncio.timeout(120):
        while True:
            again = await stranger(verifier)
            with suppress(grpc.aio.AioRpcError):
                await again.call.read()
                break
            await asyncio.sleep(0.05)
    assert (await health.Check(asked)).status == health_pb2.HealthCheckResponse.SERVING
    again.say(open_session(b"s" * 16))
    assert len(await output(again, b"s" * 16)) == 4


async def test_one_that_leaves_lets_nobody_in_though_the_step_ends_after_all(verifier: Running) -> None:
    verifier.service.routers.turn_away(Unavailable("a step does not end"))
    await verifier.service.close_gracefully()
    verifier.service.routers.let_in()
    assert "leaves" in await until_turned_away(await stranger(verifier))


async def test_one_that_does_not_end_at_all_is_given_up_for_good(
    verifier: Running, hang: Any, watch: asyncio.Task[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.worker.stepwatch.TIMES_OVERDUE", 2.0)
    talk = await router(verifier)
    talk.say(open_session(b"s" * 16, max_tokens=900))
    assert (await talk.hear()).committed
    hang()
    with pytest.raises(StepHung, match="does not end"):
        async with asyncio.timeout(120):
            await watch


async def test_a_step_may_take_as_long_as_its_profile_says_many_times_over(
    verifier: Running, hang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float | None] = []

    def record(expected_seconds: float | None = None) -> Any:
        seen.append(expected_seconds)
        return under_way(expected_seconds)

    monkeypatch.setattr(stepper_module, "under_way", record)
    monkeypatch.setattr(verifier.stepper, "_step_time", verifier.stepper._ways.meter.step_time)
    talk = await router(verifier)
    talk.say(open_session(b"s" * 16, max_tokens=5))
    await output(talk, b"s" * 16)
    assert seen[0] is None  # what is made ready at first use takes its time
    assert all(seconds is not None and seconds > 0 for seconds in seen[1:])
    assert len(seen) == 5


async def test_routers_hear_signs_of_life_without_any_session_and_drafters_too(verifier: Running) -> None:
    talk, drafting = await router(verifier), await drafter(verifier)
    for _ in range(2):
        assert (await talk.hear()).HasField("load")
        assert not (await drafting.hear()).revoked
