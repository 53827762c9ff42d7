"""What the drafter says of its guesses, on traces recorded from the demo pair (benchmarks/trace.py)."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from benchmarks.trace import Trace, calibration_error, read
from drafter.acceptance_model import AcceptanceModel
from drafter.session import Guess, Verdict
from drafter.survival import FIRST_RECENT, recent_after
from outrider.sampling.sampler import Ranked

TRACES = read(Path(__file__).with_name("trace.npz"))
LEARNING = 500  # tokens before what it says is to be relied upon
AT_ONCE = 4  # sessions
WINDOW = 8
NOBODY = 99  # a token that no draw has


def replay(
    traces: list[Trace], acceptance_model: AcceptanceModel
) -> list[tuple[float, bool, list[float], int]]:
    """Every position as a drafter that follows the sessions side by side would have met it: (acceptance that
    it said, whether it was right, chances of the alternatives, rank of the target's token)."""
    said = []
    for first in range(0, len(traces), AT_ONCE):
        group = [
            (zip(trace.shares, trace.right, strict=True), [FIRST_RECENT, 0])
            for trace in traces[first : first + AT_ONCE]
        ]
        for _ in traces[first].right:
            for positions, state in group:
                shares, rank = next(positions)
                recent, depth = state
                [guess] = acceptance_model.guesses([Ranked((0, 1, 2, 3), shares)], [recent], [int(depth)])
                said.append((guess.acceptance, rank == 0, [o.chance for o in guess.alternatives], rank))
                acceptance_model.judged(guess, rank if rank >= 0 else NOBODY)
                state[0] = recent_after(recent, rank == 0)
                state[1] = (depth + 1) % WINDOW if rank == 0 else 0
    return said


def kinds() -> list[Any]:
    by_kind = groupby(TRACES, key=lambda trace: (trace.workload, trace.temperature))
    return [pytest.param(list(some), id=f"{kind[0]}-{kind[1]}") for kind, some in by_kind]


@pytest.mark.parametrize("traces", [*kinds(), pytest.param(TRACES, id="all")])
def test_what_it_says_of_a_guess_is_calibrated_after_500_tokens(traces: list[Trace]) -> None:
    said = replay(traces, AcceptanceModel())[LEARNING:]
    assert len(said) >= 1000
    assert calibration_error([s[0] for s in said], [s[1] for s in said]) <= 0.05


def test_what_it_says_of_the_alternatives_is_calibrated_too() -> None:
    said = [s for s in replay(TRACES, AcceptanceModel())[LEARNING:] if not s[1]]
    for rank in (1, 2, 3):
        error = calibration_error([s[2][rank - 1] for s in said], [s[3] == rank for s in said])
        assert error <= 0.08
    assert sum(s[3] > 0 for s in said) >= 0.7 * len(said)  # enough to cover as many


def test_a_confident_guess_says_more_than_the_share_of_right_ones() -> None:
    """The likelihood of what happened must beat a constant's: calibrated alone would be easy."""
    said = replay(TRACES, AcceptanceModel())[LEARNING:]
    rate = sum(s[1] for s in said) / len(said)
    brier = sum((s[0] - s[1]) ** 2 for s in said) / len(said)
    assert brier < 0.75 * rate * (1 - rate)


def test_the_calibration_error_is_that_of_the_bins() -> None:
    assert calibration_error([0.25, 0.25, 0.85, 0.85], [True, False, True, True]) == pytest.approx(0.2)
    assert calibration_error([1.0, 0.0], [True, False]) == 0.0


def test_rejections_are_counted_and_those_that_a_branch_covered() -> None:
    acceptance_model = AcceptanceModel()
    guess = Guess(1, 0.9, 0.5, 0, 0.8)
    acceptance_model.learn(Verdict(judged=((guess, 1),)))
    acceptance_model.learn(Verdict(judged=((guess, 2),), rejected=True))
    assert (acceptance_model.rejections, acceptance_model.covered, acceptance_model.taken.trials) == (1, 0, 2)
