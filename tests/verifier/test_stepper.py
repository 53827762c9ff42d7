"""The stepper with a real engine: what drafts and prompts may cost, and that the text is the same.

Time is virtual: a step takes what its number of tokens says, whatever the machine does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from outrider.engine.engine import Engine, Step, Work
from outrider.engine.kv_blocks import BlockPool
from outrider.engine.loading import load_engine
from outrider.options.engine import StepLimits
from outrider.sampling.params import SamplingParams
from outrider.wire.session import SessionParams
from tests.tiny_models import build
from verifier.price import StepTime
from verifier.session import Session, SessionSpec
from verifier.step_start import Pace
from verifier.stepper import Running, Stepper, StepReport

FLAT = {1: 0.04, 512: 0.04}
KNEE = {1: 0.04, 8: 0.04, 512: 0.04 + 504 * 2e-3}  # eight tokens are free, then 2 ms each
STEEP = {1: 0.001, 512: 0.512}  # a millisecond a token
BUSY = {1: 0.009, 512: 0.520}  # the same beside 8 ms that each step takes
SESSIONS, TOKENS = 4, 40

Say = Callable[[list[int]], tuple[list[int], bytes]]
"""What a drafter says, given the output that is to come: tokens and their survival."""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = load_engine(str(build("llama", tmp_path / "target")), threads=1, kv_memory_bytes=2**24)
    yield engine
    engine.pool.check_integrity([])


def spec(number: int, prompt: tuple[int, ...], max_tokens: int = TOKENS) -> SessionSpec:
    greedy = SamplingParams(temperature=0.0)
    return SessionSpec(bytes([number]) * 16, SessionParams(prompt, greedy, max_tokens), (), 199, b"")


@dataclass
class Run:
    """All sessions from their opening to their end, every step of them drafted for by `say`."""

    engine: Engine
    seconds: dict[int, float]
    say: Say | None = None
    expected: list[list[int]] | None = None  # what the sessions will output
    now: float = 0.0
    verified: int = 0
    accepted: int = 0
    steps: list[int] = field(default_factory=list)  # tokens of each
    late: SessionSpec | None = None  # opened after ten steps

    async def outputs(self, specs: list[SessionSpec]) -> list[list[int]]:
        step_time = StepTime.measured(self.seconds)
        prepare = self.engine.prepare

        def prepare_and_take_time(works: Sequence[Work]) -> Step:
            self.now += step_time.at(sum(len(work.tokens) for work in works))
            return prepare(works)

        self.engine.prepare = prepare_and_take_time  # type: ignore[method-assign]
        self.stepper = Stepper(
            self.engine,
            StepLimits(),
            self._on_step,
            lambda: self.now,
            lambda now, *_: now,
            StepTime.measured(self.seconds),
        )
        self._opened = [self._open(each) for each in specs]
        steps = asyncio.create_task(self.stepper.run())
        async with asyncio.timeout(120):
            await self.stepper.until_empty()
        steps.cancel()
        await asyncio.gather(steps, return_exceptions=True)
        self.engine.prepare = prepare  # type: ignore[method-assign]
        return [running.session.log[len(running.session.spec.params.prompt) :] for running in self._opened]

    def _open(self, spec: SessionSpec) -> Running:
        running = self.stepper.open(spec, 4)
        if self.say is not None:
            running.seats[0].seated(Pace())
        return running

    def _on_step(self, report: StepReport) -> None:
        self.steps.append(report.load.step_tokens)
        if self.late is not None and len(self.steps) == 10:
            self._opened.append(self._open(self.late))
        for running, outcome in report.outcomes:
            self.verified += outcome.verified
            self.accepted += outcome.accepted
            if self.say is not None and self.expected is not None and outcome.finish is None:
                session = running.session
                coming = self.expected[session.spec.session_id[0]][session.output_length :]
                tokens, survival = self.say(coming)
                self.stepper.offer(running.seats[0], len(session.log), tokens, [], survival)


PROMPTS = [tuple((7 * number + 3 * place) % 199 for place in range(12)) for number in range(SESSIONS)]


async def plain(engine: Engine) -> list[list[int]]:
    return await Run(engine, FLAT).outputs([spec(number, prompt) for number, prompt in enumerate(PROMPTS)])


async def drafted(engine: Engine, seconds: dict[int, float], say: Say) -> Run:
    expected = await plain(engine)
    run = Run(engine, seconds, say, expected)
    assert await run.outputs([spec(number, prompt) for number, prompt in enumerate(PROMPTS)]) == expected
    return run


async def test_where_tokens_are_free_all_drafts_are_verified(engine: Engine) -> None:
    run = await drafted(engine, FLAT, lambda coming: (coming[:3], bytes([60, 40, 20])[: len(coming[:3])]))
    assert run.accepted == run.verified > SESSIONS * TOKENS / 3


async def test_a_saturated_verifier_leaves_unlikely_drafts_out(engine: Engine) -> None:
    run = await drafted(engine, STEEP, lambda coming: (coming[:3], bytes([60, 40, 20])[: len(coming[:3])]))
    assert run.verified == 0


async def test_a_saturated_verifier_still_takes_what_is_certain(engine: Engine) -> None:
    """Four tokens are free beside the four sessions; each further one costs 2 of some 48 ms."""
    run = await drafted(engine, KNEE, lambda coming: (coming[:3], bytes([250, 245, 10])[: len(coming[:3])]))
    assert run.accepted == run.verified > SESSIONS * TOKENS / 3


async def test_who_promises_everything_and_keeps_nothing_is_soon_left_out(engine: Engine) -> None:
    """Else every other step would verify its four tokens: 320 in all."""

    def lie(coming: list[int]) -> tuple[list[int], bytes]:  # the first token is committed before this comes
        return [*coming[:1], *[(token + 1) % 199 for token in coming[1:2] * 4]], b"\xff" * (
            1 + 4 * (len(coming) > 1)
        )

    run = await drafted(engine, BUSY, lie)
    assert run.accepted == 0
    assert SESSIONS <= run.verified < 16 * SESSIONS


async def test_a_prompt_is_read_in_chunks_that_hardly_delay_those_who_decode(engine: Engine) -> None:
    expected = await plain(engine)
    prompt = tuple((5 * place) % 199 for place in range(300))
    run = Run(engine, KNEE, late=spec(9, prompt, 4))
    outputs = await run.outputs([spec(number, text) for number, text in enumerate(PROMPTS)])
    assert outputs == expected + await Run(engine, FLAT).outputs([spec(9, prompt, 4)])
    beside = [tokens for tokens in run.steps[10:] if tokens > SESSIONS + 1]
    assert len(beside) >= 10 and max(beside) < 60  # a chunk of 256 would make a step 13 times as long


async def test_prompts_that_are_cached_start_together(engine: Engine) -> None:
    """Though whole they would be more than what may be read beside those who decode."""
    prompts = [tuple((number + 5 * place) % 199 for place in range(101)) for number in range(8)]
    cold = Run(engine, KNEE)
    outputs = await cold.outputs([spec(number, prompt, 12) for number, prompt in enumerate(prompts)])
    assert cold.steps[0] == 80  # of 808: a step of .2 seconds
    warm = Run(engine, KNEE)
    assert await warm.outputs([spec(number, prompt, 12) for number, prompt in enumerate(prompts)]) == outputs
    assert warm.steps[:2] == [8 * 5, 8]  # 96 tokens of each are in the cache
    stepper = Stepper(engine, StepLimits(), lambda report: None, lambda: 0.0)
    for number, prompt in enumerate([*prompts, tuple(range(101))]):
        stepper.open(spec(number, prompt), 0)
    assert stepper.load.unread_prompt_tokens == 8 * 4 + 100  # what routers expect the next one to wait for


async def test_sessions_with_one_prompt_read_it_once(engine: Engine) -> None:
    """They come at the same time: all but the first wait until its blocks are there."""
    prompt = tuple((5 * place) % 199 for place in range(101))
    alone = await Run(engine, FLAT).outputs([spec(1, prompt, 4)])
    engine.pool = BlockPool(engine.pool.num_blocks)
    run = Run(engine, FLAT)
    assert await run.outputs([spec(number, prompt, 4) for number in range(5)]) == alone * 5
    assert run.steps[:2] == [101, 1 + 4 * 5]  # 96 tokens of each are in shared blocks


async def test_a_prompt_that_others_hold_needs_no_room_of_its_own(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "pool", BlockPool(12))  # not enough for two of 101 tokens
    prompt = tuple((5 * place) % 199 for place in range(101))
    run = Run(engine, FLAT, late=spec(9, prompt, 4))
    first, second = await run.outputs([spec(1, prompt)])
    assert second == first[:4]
    assert run.steps[11:16] == [1 + 5, 2, 2, 2, 1]


def test_a_drafter_that_takes_over_has_missed_nothing_yet() -> None:
    running = Running(Session(spec(1, (1, 2, 3)), 4), None)
    for now in (1.0, 2.0):
        seat = running.seats[0]
        seat.arrivals = seat.arrivals.committed(now, verified=0)
    assert running.seats[0].arrivals.silent
    running.seats[0].seated(Pace())
    assert not running.seats[0].arrivals.silent


async def test_who_comes_with_output_has_its_next_token_before_those_who_came_first_have_any(
    engine: Engine,
) -> None:
    """It has lost another verifier, and its client waits in the middle of the text."""
    prompts = [tuple((7 * number + 3 * place) % 199 for place in range(40)) for number in range(SESSIONS)]
    whole = await Run(engine, FLAT).outputs([spec(number, prompt) for number, prompt in enumerate(prompts)])
    moved = replace(spec(SESSIONS - 1, prompts[-1]), output=tuple(whole[-1][:20]))
    told: list[int] = []

    def on_step(report: StepReport) -> None:
        told.extend(running.id[0] for running, _ in report.outcomes)

    stepper = Stepper(
        engine, StepLimits(max_batch_tokens=8, prefill_chunk=8), on_step, lambda: 0.0, lambda now, *_: now
    )
    everyone = [spec(number, prompt) for number, prompt in enumerate(prompts[:-1])]
    opened = [stepper.open(each, 0) for each in (*everyone, moved)]
    steps = asyncio.create_task(stepper.run())
    async with asyncio.timeout(120):
        await stepper.until_empty()
    steps.cancel()
    await asyncio.gather(steps, return_exceptions=True)
    assert list(dict.fromkeys(told)) == [SESSIONS - 1, *range(SESSIONS - 1)]
    assert [running.session.log[40:] for running in opened] == whole
    assert stepper.load.preemptions == 0


async def test_what_a_step_showed_is_learnt_once_the_next_one_runs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has something to do meanwhile. It is learnt before anybody drafts on."""
    specs = [spec(number, prompt) for number, prompt in enumerate(PROMPTS)]
    expected = await Run(engine, FLAT).outputs(specs)
    survival = bytes([200, 150, 100])
    run = Run(engine, FLAT, lambda coming: (coming[:3], survival[: len(coming[:3])]), expected)
    waiting: list[int] = []
    run_step = engine.run_step

    def noted(*arguments: Any) -> Any:
        waiting.append(sum(running._lesson is not None for running in run._opened))
        return run_step(*arguments)

    monkeypatch.setattr(engine, "run_step", noted)
    assert await run.outputs(specs) == expected
    assert max(waiting) == SESSIONS
    learnt = [sum(running.seats[0].calibration.promised) for running in run._opened]
    assert run.verified > 0 and min(learnt) > 0, "of each session"
