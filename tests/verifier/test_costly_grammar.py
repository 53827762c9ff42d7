"""A grammar that takes too much to follow ends its own session, in words, and holds up nobody else's; nor do
many together that take a part of that."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from outrider.engine.loading import load_engine, load_tokenizer
from outrider.grammar import Grammars, Mask, Place, Queue, _threads
from outrider.grammar_company import COSTLY_SECONDS, FORCED_REST, LIKELY_REST, Company
from outrider.options.engine import StepLimits
from outrider.sampling.params import SamplingParams
from outrider.wire.session import FinishReason, SessionParams
from tests.tiny_models import build
from verifier.nodes import NO_NODES
from verifier.running import Running
from verifier.session import Session, SessionSpec
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


async def test_it_ends_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = build("llama", tmp_path / "target")
    alone, _, _ = await run(folder, [spec(1)])
    outputs, finished, lost = await run(folder, [spec(1), spec(2, ENDLESS), spec(3, "{")])
    assert lost == {2, 3}
    assert finished == {1} and outputs[1] == alone[1]
    assert outputs[2] and not outputs[3]
    told = {line.split()[1]: line for line in caplog.messages if "ended by its grammar" in line}
    assert {*told} == {"02" * 16, "03" * 16}, "each is named"
    assert "too many expressions" in told["02" * 16]


def first(mask: Mask | None, *, last: bool = False) -> int:
    """Returns the lowest token that may come, or the highest."""
    assert mask is not None
    return int(np.flatnonzero(np.unpackbits(mask, bitorder="little"))[-1 if last else 0])


def test_it_ends_no_other_text_of_the_same_grammar(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(build("llama", tmp_path / "target"))).json
    grammars = Grammars(tokenizer, [0])
    one, other = (standing(grammars, ENDLESS) for _ in range(2))
    one._costly = other._costly = False
    for _ in range(400):
        (allowed,) = one.masks([])
        if (mask := allowed()) is None:
            break
        one.follow([first(mask, last=True)])
    assert one.fault is not None
    assert other.masks([])[0]() is not None and other.fault is None
    assert standing(grammars, ENDLESS).fault is None, "nor one that begins later"


def test_a_text_that_has_come_to_its_end_is_not_one_whose_grammar_fails(tmp_path: Path) -> None:
    """Behind its end a grammar has nothing."""
    tokenizer = load_tokenizer(str(build("llama", tmp_path / "target"))).json
    place = standing(Grammars(tokenizer, [0]), 'start: "ab"')
    running, finish = Running(Session(spec(1, "is given"), 0), None, place), None
    while finish is None:
        place._costly = True  # the next mask is looked for at once
        token = first(place.masks([])[0]())
        finish = running.commit(NO_NODES, [token], 0.0).finish
        place._work.result()
    assert finish is FinishReason.STOP and not running.lost


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


class Standing:
    """Stands for a place."""


def test_places_that_are_dear_share_what_one_may_cost() -> None:
    company, places = Company(lambda: 0.0), [Standing() for _ in range(40)]
    costly: Any = company.is_costly
    assert not costly(places[0], COSTLY_SECONDS) and costly(places[0], 1.1 * COSTLY_SECONDS)
    assert [costly(place, COSTLY_SECONDS / 4) for place in places].count(False) == 4
    assert not costly(places[0], 0.00005), "ordinary ones are never"
    del places[1:]
    assert not costly(places[0], COSTLY_SECONDS), "those that are over count no more"


class Counted:
    """A matcher that counts how often it looks for forced text."""

    def __init__(self, matcher: Any) -> None:
        self.matcher, self.times = matcher, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.matcher, name)

    def forced(self) -> list[int]:
        self.times += 1
        found: list[int] = self.matcher.forced()
        return found


def standing(grammars: Grammars, grammar: str) -> Place:
    ready = threading.Event()
    place = grammars.place(grammar, (), ready.set)
    assert ready.wait(60)
    return place


def test_long_forced_text_is_found_once_and_then_none_for_a_while(tmp_path: Path) -> None:
    """While it is looked for, nothing else runs in the process."""
    now = [0.0]
    tokenizer = load_tokenizer(str(build("llama", tmp_path / "target"))).json
    grammars = Grammars(tokenizer, [0], clock=lambda: now[0])
    text = json.dumps("to be or not to be, that is what they ask " * 25)
    one, other = (standing(grammars, f"start: {text}\n") for _ in range(2))
    one._costly = other._costly = False  # as on a quicker machine
    counted: Any = Counted(one._matcher)
    one._matcher = counted
    told, came = one.forced(8), list[int]()
    for _ in range(20):
        came += one.forced(4)
        one.follow(one.forced(4))
    assert came[:8] == told and len(came) == 80 and counted.times == 1
    grammars._company.forced(0.01)
    assert other.forced(8) == []
    now[0] += 0.01 * FORCED_REST
    assert other.forced(8) == told
    one.follow([one.forced(1)[0] + 1])
    assert one.forced(8) == [], "the text has gone on otherwise than the grammar allows"


def test_what_is_likely_is_looked_for_in_a_part_of_the_time(tmp_path: Path) -> None:
    """Steps wait for it."""
    now = [0.0]
    tokenizer = load_tokenizer(str(build("llama", tmp_path / "target"))).json
    grammars = Grammars(tokenizer, [0], clock=lambda: now[0])
    place = standing(grammars, 'start: "a" ("b" | "c") "b" "b"')
    place._costly = False  # as on a quicker machine
    asked: list[int | None] = []

    def choose(before: int | None, mask: Mask) -> int | None:
        asked.append(before)
        return int(np.flatnonzero(np.unpackbits(mask, bitorder="little"))[0])

    found = place.likely(8, choose)
    assert any(chosen for _, chosen in found) and asked
    grammars._company.chose(0.01)
    asked.clear()
    assert place.likely(8, choose) == [(token, False) for token in place.forced(8)] and not asked
    now[0] += 0.01 * LIKELY_REST
    assert place.likely(8, choose) == found
