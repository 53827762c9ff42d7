"""A drafter that takes the target's time rests, really, and drafts again when it costs nothing any more.

The verifier's seconds are counted: each of its steps takes two, and each forward of the drafter some more, as
both share their cores. Models, streams and router are real ones.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.sampling.params import SamplingParams
from tests.in_process import Cluster, Worker
from tests.tiny_models import build

PROMPT = [5, 17, 40, 3]
GREEDY = SamplingParams(temperature=0.0)
STEP = 2.0
TOKENS = 900
RESTED = 12  # steps in a row
DRAFTED_SECONDS = 0.2  # in which a forward begins, if the drafter has anything to do


@dataclass
class Shared:
    """The time of cores that both models use."""

    forward: float  # seconds
    spent: float = 0.0
    forwards: int = 0
    seen: int = 0  # of them, when the target's last step began

    def clock(self) -> float:
        return self.spent

    def count(self, worker: Worker, drafts: bool) -> None:
        engine = worker.stepper._engine
        prepare, choose = engine.prepare, engine.choose

        def counted(works: Any) -> Any:
            self.forwards += drafts
            self.spent += self.forward if drafts else STEP
            return prepare(works)

        def accompanied(*args: Any) -> Any:
            """In a counted second there is time for a draft, however busy the machine is."""
            give_up = time.monotonic() + DRAFTED_SECONDS
            while not worker.stepper.resting and self.forwards == self.seen and time.monotonic() < give_up:
                time.sleep(0.001)
            self.seen = self.forwards
            return choose(*args)

        engine.prepare = counted
        if not drafts:
            engine.choose = accompanied


async def test_a_drafter_rests_while_it_costs_more_than_it_brings(tmp_path: Path) -> None:
    target = build("llama", tmp_path / "target")
    async with Cluster(target) as alone:
        expected = await alone.ask(PROMPT, GREEDY, TOKENS)
    shared = Shared(forward=2 * STEP)  # five tokens a step, in the time of nine
    async with Cluster(target, clock=shared.clock, compare=True) as cluster:
        drafter = await cluster.add_drafter(target)  # it is always right
        shared.count(cluster.verifier, drafts=False)
        shared.count(drafter, drafts=True)
        stepper = cluster.verifier.stepper
        seen: list[tuple[bool, int]] = []  # by step: whether drafts rest, the drafter's forwards so far

        async def watch(output: list[int]) -> None:
            seen.append((stepper.resting, shared.forwards))
            if len(output) > TOKENS // 4:
                shared.forward = 0.0

        answer = await cluster.ask(PROMPT, GREEDY, TOKENS, on_tokens=watch)
    assert answer.tokens == expected.tokens
    resting = [
        place for place in range(RESTED, len(seen)) if all(rests for rests, _ in seen[place - RESTED : place])
    ]
    assert resting, "drafts never rested"
    assert all(seen[place - 1][1] == seen[place - RESTED // 2][1] for place in resting), (
        "a resting drafter worked"
    )
    # The answer may end amid one of the short trials of plain decoding.
    drafted = sum(not rests for rests, _ in seen[resting[-1] :])
    assert drafted > RESTED and stepper.load.draft_gain > 1, "drafts did not return"
    assert len(seen) < 0.85 * TOKENS


async def test_one_that_finds_no_guesses_is_compared_as_soon_as_it_follows(tmp_path: Path) -> None:
    """It has nothing to say for nearly all steps, and no comparison waits for that."""
    target = build("llama", tmp_path / "target")
    drawn, tokens = SamplingParams(temperature=1.0, seed=3), 400
    async with Cluster(target) as alone:
        expected = await alone.ask(PROMPT, drawn, tokens)
    shared = Shared(forward=0.0)
    async with Cluster(target, clock=shared.clock, compare=True, patience_seconds=0.0) as cluster:
        await cluster.add_looking_up()
        stepper = cluster.verifier.stepper
        choose, rested = stepper._engine.choose, list[bool]()

        def counted(*args: Any) -> Any:
            rested.append(stepper.resting)
            shared.spent += 0.05 if stepper.resting else 0.06
            time.sleep(0.001)  # in which a drafter is heard
            return choose(*args)

        stepper._engine.choose = counted
        answer = await cluster.ask(PROMPT, drawn, tokens)
    assert answer.tokens == expected.tokens and answer.verified < tokens / 10
    assert sum(rested[tokens // 2 :]) > 0.8 * len(rested[tokens // 2 :])
