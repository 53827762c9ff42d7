"""A KV pool too small for all: sessions give way and come back, nobody fails, and the text is the same."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from outrider.engine.engine import Engine
from outrider.engine.kv_blocks import BlockPool
from outrider.engine.loading import load_engine
from outrider.options.engine import StepLimits
from outrider.sampling.params import SamplingParams
from outrider.wire.session import SessionParams
from tests.telemetry.recorder import Recorder
from tests.tiny_models import build
from verifier.meter import Meter
from verifier.part import Part
from verifier.running import Running
from verifier.session import Session, SessionSpec
from verifier.step_plan import MOST_PASSED, StepPlanner
from verifier.stepper import Stepper, StepReport

BLOCKS = 12  # of 16 tokens: one session of the longest kind, or a few that have just begun


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder: Path = build("llama", tmp_path_factory.mktemp("target"))
    return load_engine(str(folder), threads=1, kv_memory_bytes=2**24)


def specs() -> list[SessionSpec]:
    made = []
    for number in range(10):
        sampling = SamplingParams(temperature=0.0 if number % 2 else 0.8, seed=number)
        prompt = tuple((7 * number + place) % 190 for place in range(5 + 9 * number))
        max_tokens = 150 - len(prompt) - number
        made.append(
            SessionSpec(bytes([number]) * 16, SessionParams(prompt, sampling, max_tokens), (), 199, b"")
        )
    return made


async def run(
    engine: Engine, together: list[SessionSpec], tracer: Recorder | None = None
) -> tuple[list[list[int]], list[Running], int]:
    """The outputs, the sessions, and how often one was preempted."""
    failed: list[Running] = []

    def on_step(report: StepReport) -> None:
        failed.extend(report.failed)

    stepper = Stepper(engine, StepLimits(), on_step, time.monotonic, lambda now, *_: now, tracer=tracer)
    opened = [stepper.open(each, 0) for each in together]
    steps = asyncio.create_task(stepper.run())
    async with asyncio.timeout(120):
        await stepper.until_empty()
    steps.cancel()
    await asyncio.gather(steps, return_exceptions=True)
    assert not failed
    outputs = [each.session.log[len(each.session.spec.params.prompt) :] for each in opened]
    return outputs, opened, stepper.load.preemptions


async def test_with_a_pool_too_small_all_finish_with_the_same_text(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _, none = await run(engine, specs())
    assert none == 0
    monkeypatch.setattr(engine, "pool", BlockPool(BLOCKS))
    recorder = Recorder()
    crowded, opened, preemptions = await run(engine, specs(), recorder)
    assert crowded == plain
    assert [len(output) for output in crowded] == [each.params.max_tokens for each in specs()]
    assert preemptions == sum(running.preemptions for running in opened) > 0
    engine.pool.check_integrity([])
    assert sorted({span.name for span in recorder.spans}) == ["decode", "prefill", "queue"]
    assert len(recorder.spans) == 3 * len(opened) and all(span.ended == [""] for span in recorder.spans)
    told = [name for span in recorder.spans for name, _ in span.events if name == "preempted"]
    assert len(told) == preemptions


def test_only_what_nobody_else_holds_is_lost() -> None:
    pool = BlockPool(8)
    tokens = list(range(40))
    first = pool.open(tokens)
    pool.extend(first, 40)
    pool.seal(first, tokens)
    assert pool.own_tokens(first) == 40
    second = pool.open([*tokens[:32], 99])
    pool.extend(second, 1)
    assert (pool.own_tokens(first), pool.own_tokens(second)) == (16, 16)
    pool.close(second)
    assert pool.own_tokens(first) == 40


async def test_small_ones_pass_one_that_does_not_fit_until_so_many_have(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long answer holds most of the pool, and a prompt waits that does not fit beside it."""
    monkeypatch.setattr(engine, "pool", BlockPool(BLOCKS))
    planner = StepPlanner(engine.pool, StepLimits(), lambda session_id: None, engine.info.vocab_size)
    sessions: dict[bytes, Running] = {}

    def come(number: int, prompt: int) -> Running:
        params = SessionParams(tuple(range(prompt)), SamplingParams(seed=number), 8)
        spec = SessionSpec(number.to_bytes(16), params, (), 199, b"")
        running = sessions[spec.session_id] = Running(Session(spec, 0), None)
        return running

    def go(running: Running) -> None:
        engine.pool.close(sessions.pop(running.id).table)

    long, large = come(1, 100), come(2, 120)
    planner.plan(sessions, Meter())
    passed = 0
    while True:
        small = come(3 + passed, 5)
        if small.id not in {part.running.id for part in planner.plan(sessions, Meter())}:
            break
        passed += 1
        go(small)
    assert passed == MOST_PASSED == large.passed
    another = come(100, 5)
    go(long)
    parts = [part.running for part in planner.plan(sessions, Meter())]
    assert parts[0] is large and another not in parts[:1]


def test_many_that_wait_for_one_prompt_cost_a_step_no_more_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, hashed = 160, 0
    chain = BlockPool._chain

    def counted(pool: BlockPool, *rest: Any) -> bytes:
        nonlocal hashed
        hashed += 1
        return chain(pool, *rest)

    monkeypatch.setattr(BlockPool, "_chain", counted)
    pool, sessions = BlockPool(4 * blocks), dict[bytes, Running]()
    planner = StepPlanner(pool, StepLimits(), lambda session_id: None, 199)
    prompt = tuple(range(16 * blocks + 1))
    for number in range(64):
        spec = SessionSpec(number.to_bytes(16), SessionParams(prompt, SamplingParams(), 8), (), 9999, b"")
        sessions[spec.session_id] = Running(Session(spec, 0), None)
    parts: list[Part] = []
    while len(parts) < 2:
        parts = planner.plan(sessions, Meter())
        for part in parts:
            pool.seal(part.running.table, part.running.session.log)
    assert len(parts) > 30 and hashed <= 4 * blocks
    for running in sessions.values():
        pool.close(running.table)
    pool.check_integrity([])
