"""The measurement of a fleet runs, on a small one."""

from __future__ import annotations

import pytest

from benchmarks import fleet
from benchmarks.fleet import burst, joining, killed, placement, spread
from tests.benchmarks.whole import whole


async def test_placements_and_bursts_are_measured() -> None:
    placed = await placement(20, 80, 50)
    assert 0 < placed["p50_ms"] <= placed["p99_ms"] <= placed["most_ms"]
    assert (await burst(3, 20, 20, 3))["median"] > 0


@whole
@pytest.mark.process
async def test_a_fleet_joins_idles_and_dies_by_half(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REGISTERED_SECONDS", "SETTLED_SECONDS", "RUNNING_SECONDS"):
        monkeypatch.setattr(fleet, name, 1.0)
    found = await joining(2, 4, 1.5)
    assert found["all_known_s"] < 60 and found["metrics_kib"] > 1
    died = await killed(4, 6)
    assert died == {"running": 6, "failed": 0, "sessions": 6}


def test_a_spread_has_the_median_and_both_ends() -> None:
    runs = [{"a": 3.0}, {"a": 1.0}, {"a": 2.0}]
    assert spread(runs) == {"a": {"median": 2.0, "least": 1.0, "most": 3.0}}
