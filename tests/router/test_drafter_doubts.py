"""For how long which doubts about drafters hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from router.drafter_doubts import MOST_DOUBTS, SILENT_SECONDS, UNREACHED_SECONDS, DrafterDoubts
from router.metrics import Metrics


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def worker(worker_id: str) -> Any:
    return SimpleNamespace(identity=SimpleNamespace(worker_id=worker_id))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def doubts(clock: Clock) -> DrafterDoubts:
    return DrafterDoubts(Metrics(), clock)


def test_one_that_does_not_reach_a_verifier_is_doubted_there_only_and_for_a_while(
    doubts: DrafterDoubts, clock: Clock
) -> None:
    doubts.unreached(worker("d"), worker("v"), "a wall")
    assert doubts.about("d", "v") and not doubts.about("d", "w") and not doubts.about("e", "v")
    assert doubts.told() == "drafter d does not draft for verifier v"
    clock.now = UNREACHED_SECONDS
    assert not doubts.about("d", "v") and not doubts.told()


def test_one_that_is_silent_is_doubted_everywhere_and_a_later_doubt_makes_no_former_one_shorter(
    doubts: DrafterDoubts, clock: Clock
) -> None:
    doubts.cut_off(worker("d"), "lies")
    doubts.silent(worker("d"), "")
    clock.now = SILENT_SECONDS
    assert doubts.about("d", "v") and not doubts.told()


def test_what_one_owner_asks_for_makes_a_drafter_silent_for_that_owner_only(doubts: DrafterDoubts) -> None:
    """A grammar that costs much, for instance, has no drafts."""
    doubts.silent(worker("d"), "a")
    assert doubts.about("d", "v", "a") and not doubts.about("d", "v", "b") and not doubts.about("d", "v")


def test_what_is_told_and_kept_is_bounded(doubts: DrafterDoubts) -> None:
    for number in range(MOST_DOUBTS + 1):
        doubts.unreached(worker(f"d{number}"), worker("v"), "a wall")
    assert not doubts.about("d0", "v") and doubts.about(f"d{MOST_DOUBTS}", "v")
    assert doubts.told().endswith(f"and {MOST_DOUBTS - 3} more")
