"""A grammar that takes too much to follow ends its own session, in words, and holds up nobody else's."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

from llguidance import LLMatcher

from outrider.engine.loading import load_engine, load_tokenizer
from outrider.grammar import Grammars, Queue, _threads
from outrider.options.engine import StepLimits
from outrider.sampling.params import SamplingParams
from outrider.wire.session import FinishReason, SessionParams
from tests.tiny_models import build
from verifier.session import SessionSpec
from verifier.stepper import Stepper, StepReport

ENDLESS = LLMatcher.grammar_from_regex("(a|b){1,1000}{1,1000}")


def spec(number: int, grammar: str = "") -> SessionSpec:
    greedy = SamplingParams(temperature=0.0)
    drawn = SamplingParams(temperature=2.0, seed=number, logit_bias={0: -100.0})
    params = SessionParams(
        (5, 6, 7), drawn if grammar else greedy, 400, (0,) if grammar else (), grammar=grammar
    )
    return SessionSpec(bytes([number]) * 16, params, (), 199, b"")


async def run(folder: Path, specs: list[SessionSpec]) -> tuple[dict[int, list[int]], set[int], set[int]]:
    """Returns the output of each session, and which were finished and which lost."""
    engine = load_engine(str(folder), threads=1, kv_memory_bytes=2**24)
    grammars = Grammars(load_tokenizer(str(folder)).json, engine.info.eos_token_ids)
    outputs: dict[int, list[int]] = {each.session_id[0]: [] for each in specs}
    finished, lost = set[int](), set[int]()

    def on_step(report: StepReport) -> None:
        for running, outcome in report.outcomes:
            outputs[running.id[0]] += outcome.tokens
            if outcome.finish is FinishReason.LENGTH:
                finished.add(running.id[0])
        lost.update(running.id[0] for running in report.failed if running.lost)

    stepper = Stepper(engine, StepLimits(), on_step, time.monotonic, lambda now, *_: now, grammars=grammars)
    for each in specs:
        stepper.open(each, 0)
    steps = asyncio.create_task(stepper.run())
    async with asyncio.timeout(120):
        await stepper.until_empty()
        await asyncio.sleep(0.1)
    steps.cancel()
    await asyncio.gather(steps, return_exceptions=True)
    engine.pool.check_integrity([])
    return outputs, finished, lost


async def test_it_ends_alone(tmp_path: Path) -> None:
    folder = build("llama", tmp_path / "target")
    alone, _, _ = await run(folder, [spec(1)])
    outputs, finished, lost = await run(folder, [spec(1), spec(2, ENDLESS), spec(3, "{")])
    assert lost == {2, 3}
    assert finished == {1} and outputs[1] == alone[1]
    assert outputs[2] and not outputs[3]


async def test_a_step_s_masks_stand_behind_nothing_that_one_session_waits_for(tmp_path: Path) -> None:
    """Or whoever has many grammars compiled, or a costly one followed, would hold up everybody's steps."""
    tokenizer = load_tokenizer(str(build("llama", tmp_path / "target"))).json
    ready, never = threading.Event(), threading.Event()
    place = Grammars(tokenizer, [0]).place(LLMatcher.grammar_from_regex("(a|b)*"), (), ready.set)
    try:
        assert await asyncio.to_thread(ready.wait, 60) and place.ready
        for _ in range(8):
            _threads(Queue.SESSION).submit(never.wait)
        masks = place.masks([])
        async with asyncio.timeout(60):
            assert await asyncio.to_thread(masks[0]) is not None
    finally:
        never.set()
