"""What the project has set itself to reach, as ratios of cells of one run. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from outrider_cli.bench.cells import LOCK_STEP, PLAIN, STREAMING, TUNED, Cell, Setting
from outrider_cli.bench.figures import Measured, Spread, ratio

Runs = Mapping[Cell, Sequence[Measured]]  # repetitions of each cell

NEAR, FAR = 0.0, 20.0  # ms of round trip
NEVER_SLOWER = 0.98
NEAR_CODE = Setting("code", 0.0, 1, NEAR)
FAR_CODE = replace(NEAR_CODE, rtt_ms=FAR)


@dataclass(frozen=True, slots=True)
class Goal:
    """One cell's rate is to be at least so many times another's."""

    name: str
    over: Cell
    under: Cell
    least: float


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    ratio: Spread
    least: float

    @property
    def met(self) -> bool:
        return self.ratio.median >= self.least


def _pair(name: str, setting: Setting, under: str, least: float) -> Goal:
    return Goal(name, Cell(STREAMING, setting), Cell(under, setting), least)


GOALS = (
    _pair("code, 1 stream, over our plain decoding", NEAR_CODE, PLAIN, 3.0),
    _pair("prose, 1 stream, over our plain decoding", replace(NEAR_CODE, workload="prose"), PLAIN, 2.0),
    _pair("code, 1 stream, over transformers' assisted generation, tuned", NEAR_CODE, TUNED, 1.8),
    _pair("code, 1 stream, 20 ms, over lock-step", FAR_CODE, LOCK_STEP, 1.5),
    _pair("code, 1 stream, 20 ms, over our plain decoding", FAR_CODE, PLAIN, 2.5),
    Goal(
        "code, 16 streams, 20 ms over 0 ms",
        Cell(STREAMING, replace(FAR_CODE, streams=16)),
        Cell(STREAMING, replace(NEAR_CODE, streams=16)),
        0.95,
    ),
)


def outcomes(runs: Runs) -> list[Outcome]:
    """Returns the outcomes of the goals whose cells were measured; the last is the worst setting of all over
    plain decoding."""
    found = []
    for goal in GOALS:
        if goal.over in runs and goal.under in runs:
            reached = ratio(runs[goal.over], runs[goal.under])
            if reached is not None:
                found.append(Outcome(goal.name, reached, goal.least))
    against_plain = [
        (reached, cell.setting)
        for cell in runs
        if cell.way == STREAMING and (reached := over_plain(runs, cell)) is not None
    ]
    if against_plain:
        worst, setting = min(against_plain, key=lambda one: one[0].median)
        found.append(Outcome(f"any setting over our plain decoding; worst: {setting}", worst, NEVER_SLOWER))
    return found


def over_plain(runs: Runs, cell: Cell) -> Spread | None:
    """Returns how many times plain decoding's rate it is, in the same setting; None if that was not
    measured."""
    plain = runs.get(Cell(PLAIN, cell.setting))
    return None if plain is None else ratio(runs[cell], plain)
