"""The measurement of hostile drafters runs, with real processes, and knows what each has done."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import hostile
from outrider_cli.bench.figures import Measured
from tests.benchmarks.whole import whole


def group(rate: float, drafted: int, accepted: int) -> Measured:
    return Measured(rate, [], [], 1.0, 8, drafted, accepted, 0, {}, rate / 2, None, 0.0)


def test_a_ratio_is_one_of_two_groups_that_ran_one_after_the_other() -> None:
    pairs = [(group(90.0, 8, 2), group(100.0, 0, 0)), (group(300.0, 4, 2), group(200.0, 0, 0))]
    found = hostile.told(group(1.0, 5, 3), pairs, tokens=10, different=0)
    assert found["at_first"] == {"rows_in_vain_a_token": 0.2, "accepted_a_token": 0.3}
    assert found["ratios"] == [0.9, 1.5]
    assert found["rows_in_vain_a_token"] == 0.4 and found["accepted_a_token"] == 0.2


@whole
@pytest.mark.process
async def test_a_drafter_with_a_wrong_tail_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile, "stay_on", lambda cores: None)  # what runs after it has all cores
    name = "the wrong tail"
    found: dict[str, Any] = await hostile.measure("demo/models/target", [name], 2, 48, 2, 0.0)
    first = found[name]["at_first"]  # the service may leave such a drafter after it
    assert first["accepted_a_token"] > 0, "the drafter was not given its sessions, or knows no text"
    assert first["rows_in_vain_a_token"] > 0
    assert found[name]["prompts_with_different_answers"] == 0
    assert len(found[name]["ratios"]) == 2
