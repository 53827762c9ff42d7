"""The measurement of what it costs to see what a service does, tiny."""

from __future__ import annotations

import pytest

from benchmarks import governor, observed
from demo import pair
from tests.benchmarks.whole import whole


@whole
async def test_a_service_that_is_observed_is_held_against_one_that_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(governor, "LEAD_SECONDS", 0.2)
    monkeypatch.setattr(governor, "KV_MEMORY", "32MiB")
    monkeypatch.setattr(observed, "EXPORT_SECONDS", 0.2)
    monkeypatch.setattr(observed, "SCRAPE_SECONDS", 0.2)
    monkeypatch.setattr(governor, "TOKENS", 16)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    found = await observed.measure(str(pair.TARGET), ["--drafters", "0"], 2, 0.5, 1, 1)
    assert found["on_over_off"]["median"] > 0 and found["on_over_off_by_processor"]["median"] > 0
    # One that its client gave up at once may not have come.
    assert 0 < found["collector"]["traces"] == found["log_lines"] <= found["requests"]
