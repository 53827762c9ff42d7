"""Waits before steps are judged by what came of them: those that do not pay are expected to bring less."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import count
from pathlib import Path

from outrider.engine.loading import load_engine
from outrider.options.engine import StepLimits
from tests.tiny_models import build
from tests.verifier.test_drafter_seat import seated, settle
from tests.verifier.test_stepper import spec
from verifier.meter import Meter
from verifier.running import Running
from verifier.session import Outcome
from verifier.step_start import Awaited, Pace
from verifier.step_wait import StepWait
from verifier.stepper import Stepper, StepReport


class Patient:
    """Waits a second before every step, and remembers what was expected of that."""

    def __init__(self) -> None:
        self.expected: list[float] = []

    def __call__(
        self, now: float, free: float, step: float, goodput: float, awaited: Iterable[Awaited], price: float
    ) -> float:
        (session,) = awaited
        self.expected.append(session.survival)
        return now + 1


def step(wait: StepWait, meter: Meter, running: Running, comes: bool) -> None:
    """One step, with a draft before the wait, and perhaps another one during it; both are right."""
    (seat,), base = running.seats, len(running.session.log)
    running.table.length = base - 1
    seat.offer(base, [9], (), b"", 0.0)
    wait.start_at([running], 0.0, 0.0, meter)
    if comes:
        seat.offer(base, [9, 8], (), b"", 0.5)
    accepted = settle(running, [9, 8, 7] if comes else [9, 8], 1.0)
    outcome = Outcome(base, (), accepted, accepted, None)
    wait.judge(1.0, [(running, outcome)], meter)


def expected(comes: bool) -> list[float]:
    running, _, second = seated()
    running.seats.remove(second)
    meter, patient = Meter(), Patient()
    meter.observe(4.0, 1, 1, None)  # so that a second costs a quarter of a token
    wait = StepWait(patient)
    for _ in range(8):
        step(wait, meter, running, comes)
    return patient.expected


def test_waits_in_which_nothing_comes_are_expected_to_bring_less() -> None:
    assert expected(comes=True) == [1.0] * 8
    vain = expected(comes=False)
    assert vain == sorted(vain, reverse=True) and vain[0] == 1.0 and vain[-1] < 0.6


async def test_a_stepper_judges_its_waits(tmp_path: Path) -> None:
    ticks = count()
    asked: list[float] = []

    def hesitant(
        now: float, free: float, step: float, goodput: float, awaited: Iterable[Awaited], price: float
    ) -> float:
        asked.append(now)
        return now + 0.001 if len(asked) % 2 else now

    def on_step(report: StepReport) -> None:
        for running, outcome in report.outcomes:
            if outcome.finish is None:  # a draft that is wrong, so that its drafter is waited for
                wrong = (outcome.tokens[-1] + 1) % 199
                stepper.offer(running.seats[0], len(running.session.log), [wrong], [], b"")

    engine = load_engine(str(build("llama", tmp_path)), threads=1, kv_memory_bytes=2**22)
    stepper = Stepper(engine, StepLimits(), on_step, lambda: float(next(ticks)), hesitant)
    stepper.open(spec(1, (1, 2, 3), 12), 4).seats[0].seated(Pace())
    steps = asyncio.create_task(stepper.run())
    async with asyncio.timeout(60):
        await stepper.until_empty()
    steps.cancel()
    await asyncio.gather(steps, return_exceptions=True)
    assert len(asked) > 4 and stepper._wait._waits.factor < 1
