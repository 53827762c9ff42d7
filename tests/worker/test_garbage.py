from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from outrider.worker.garbage import spare_what_is_there, spared_imports


@pytest.fixture
def rounds() -> Iterator[list[int]]:
    """The generation of each round of the collector."""
    begun: list[int] = []

    def heard(phase: str, told: dict[str, int]) -> None:
        if phase == "start":
            begun.append(told["generation"])

    gc.callbacks.append(heard)
    yield begun
    gc.callbacks.remove(heard)


def test_no_round_looks_at_what_is_imported_then_or_later(rounds: list[int]) -> None:
    before = gc.get_freeze_count()
    with spared_imports():
        lasting = [[] for _ in range(50_000)]  # type: ignore[var-annotated]
        assert rounds == []
    assert gc.get_freeze_count() >= before + len(lasting)
    assert [[] for _ in range(50_000)]  # what comes after is looked at
    assert rounds


def test_an_import_that_fails_leaves_the_collector_at_work() -> None:
    with pytest.raises(ImportError), spared_imports():
        raise ImportError
    assert gc.isenabled()


def test_what_a_step_makes_begins_no_round(rounds: list[int]) -> None:
    usual = gc.get_threshold()
    spare_what_is_there()
    rounds.clear()
    step = [[] for _ in range(10_000)]  # type: ignore[var-annotated]
    assert step and rounds == []
    assert [[] for _ in range(50_000)] and rounds
    gc.set_threshold(*usual)
