"""What a speculator's guesses bring and cost at a verifier, in virtual time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.engine.engine import Work
from outrider.sampling.params import SamplingParams
from outrider.sampling.ranked import Ranked
from outrider.sampling.shaping import Row
from outrider.wire.session import SessionParams
from tests.verifier.virtual_time import PROMPT, VOCAB, Target, Verifier, run, truth
from verifier.own_guesses import Own
from verifier.price import StepTime
from verifier.session import Outcome, SessionSpec
from verifier.speculator_guesses import USUAL, _tree
from verifier.stepper import StepReport

STEPS = {1: 0.01, 65: 0.074}  # seconds: a token more costs a tenth of a step
GUESSING = 0.001
GUESSES, K, SECONDS = 3, 8, 4.0


class Guessing(Target):
    """A target with a speculator whose first guesses are right."""

    def __init__(self, step_time: StepTime, right: int) -> None:
        super().__init__(step_time)
        self.speculating: Any = SimpleNamespace(guesses=GUESSES)
        self.right, self.asked, self.broken, self.share = right, 0, False, 0.9

    def choose(self, works: Sequence[Work], rows: Sequence[Row]) -> list[int]:
        self.chosen = super().choose(works, rows)
        return self.chosen

    def guess(
        self, places: Sequence[int], tokens: Sequence[int], rows: Sequence[Sequence[Row]], least: float
    ) -> list[list[Ranked]]:
        self.asked, self.least = self.asked + 1, least
        if self.broken:
            raise RuntimeError("it broke")
        assert [self.chosen[place] for place in places] == tokens
        assert [truth(row.position - 1) for row in rows[0]] == tokens
        return [
            [
                Ranked(((truth(drawn[at].position) + (ahead >= self.right)) % VOCAB,), (self.share,))
                for ahead, drawn in enumerate(rows)
            ]
            for at in range(len(tokens))
        ]

    async def run(self, call: Callable[..., Any], *arguments: object) -> Any:
        await asyncio.sleep(GUESSING)
        return call(*arguments)


class Counting:
    """A verifier of one session whose target guesses."""

    def __init__(self, right: int, sampling: SamplingParams) -> None:
        self.engine = Guessing(StepTime.measured(STEPS), right)
        self.verifier = Verifier(STEPS, self.engine)
        params = SessionParams(PROMPT, sampling, 30_000)
        self.running = self.verifier.stepper.open(SessionSpec(b"s" * 16, params, (), VOCAB, b""), K)
        self.reports: list[StepReport] = []
        self.verifier.stepper._on_step = self.reports.append

    async def pass_by(self) -> tuple[float, float]:
        """Returns tokens and verified guesses a step, in the second half of some seconds."""
        steps = asyncio.create_task(self.verifier.stepper.run())
        await asyncio.sleep(SECONDS)
        steps.cancel()
        late = self.reports[len(self.reports) // 2 :]
        outcomes = [outcome for report in late for _, outcome in report.outcomes]
        for outcome in outcomes:
            assert outcome.own.speculated == outcome.verified
            assert outcome.own.speculated_accepted == outcome.accepted
        tokens = sum(len(outcome.tokens) for outcome in outcomes)
        return tokens / len(outcomes), sum(outcome.verified for outcome in outcomes) / len(outcomes)


GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize("right", range(GUESSES + 1))
def test_what_is_right_is_taken_and_what_never_is_is_hardly_verified(right: int) -> None:
    async def main() -> None:
        tokens, verified = await Counting(right, GREEDY).pass_by()
        assert tokens == pytest.approx(1 + right, abs=0.05)
        assert right - 0.05 <= verified < right + 0.1

    run(main())


def test_its_time_is_part_of_what_its_tokens_take() -> None:
    async def main() -> None:
        counting = Counting(GUESSES, GREEDY)
        await counting.pass_by()
        meter, step = counting.verifier.stepper._ways.meter, 0.013
        assert meter.step_seconds == pytest.approx(step + GUESSING, rel=0.01)
        assert meter.goodput == pytest.approx((1 + GUESSES) / (step + GUESSING), rel=0.01)
        plain = Counting(GUESSES, GREEDY)
        plain.engine.speculating, plain.verifier.stepper._speculator.most = None, 0
        await plain.pass_by()
        assert plain.verifier.stepper._ways.meter.step_seconds == pytest.approx(0.01, rel=0.01)

    run(main())


def test_a_guess_is_made_where_it_is_worth_its_time_and_its_place() -> None:
    async def main() -> None:
        counting = Counting(GUESSES, GREEDY)
        await counting.pass_by()
        meter = counting.verifier.stepper._ways.meter
        cost = meter.price + meter.goodput * GUESSING / GUESSES
        assert counting.engine.least == pytest.approx(cost / USUAL, rel=0.01) and 0.3 < cost < 0.5

    run(main())


def test_beside_a_guess_stands_what_came_next_in_its_draw() -> None:
    ranked = [Ranked((5, 6, 7), (0.5, 0.3, 0.01)), Ranked((8, 9), (0.6, 0.2))]
    tokens, survival, source, parents = _tree(ranked, 0.05)
    assert (tokens, source, parents) == ([5, 6, 8, 9], Own.SPECULATOR, [-1, -1, 0, 0])
    assert survival == pytest.approx([0.5, 0.3, 0.3, 0.1])
    assert _tree([ranked[0], Ranked((8, 9), (float("nan"), 0.2))], 0.05)[0] == [5, 6]
    assert _tree(ranked, 0.15)[::3] == ([5, 6, 8], [-1, -1, 0])
    assert _tree(ranked, 0.4) == ([5, 8], [0.5, 0.3], Own.SPECULATOR, [])


def test_where_a_share_is_no_number_the_session_goes_without() -> None:
    async def main() -> None:
        counting = Counting(GUESSES, GREEDY)
        counting.engine.share = float("nan")
        assert await counting.pass_by() == (1, 0) and counting.engine.asked > 100

    run(main())


def test_rows_of_prompts_that_are_scored_stand_before_a_sessions_own() -> None:
    async def main() -> None:
        first, second = Counting(0, GREEDY).running, Counting(0, GREEDY).running
        parts: Any = [
            SimpleNamespace(running=first, scored=5, drawn=0),
            SimpleNamespace(running=second, scored=7, drawn=3),
        ]
        guesses = Counting(0, GREEDY).verifier.stepper._speculator
        second.id = b"t" * 16
        for followed, place in (((), 12), ((0,), 13), ((0, 1), 14)):
            outcomes = [(second, Outcome(3, (1,), 0, 0, None, followed=followed))]
            assert guesses._wanting(parts, outcomes) == [(second, place)]

    run(main())


def test_while_drafts_rest_it_is_not_asked() -> None:
    async def main() -> None:
        counting = Counting(GUESSES, GREEDY)
        counting.running.session.rest(True)
        assert await counting.pass_by() == (1, 0) and counting.engine.asked == 0

    run(main())


def test_where_each_token_changes_what_may_follow_it_is_not_asked() -> None:
    async def main() -> None:
        counting = Counting(GUESSES, SamplingParams(temperature=0.0, frequency_penalty=0.1))
        assert await counting.pass_by() == (1, 0) and counting.engine.asked == 0

    run(main())


def test_one_that_fails_guesses_no_more_and_its_sessions_go_on(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        counting = Counting(GUESSES, GREEDY)
        counting.engine.broken = True
        with caplog.at_level(logging.ERROR):
            assert await counting.pass_by() == (1, 0)
        assert counting.engine.asked == 1 and caplog.text.count("the speculator failed") == 1

    run(main())
