"""The measurement of what it costs to see what a service does, tiny."""

from __future__ import annotations

import pytest

from benchmarks import governor, observed
from demo import pair


async def test_a_service_that_is_observed_is_held_against_one_that_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(governor, "LEAD_SECONDS", 0.2)
    monkeypatch.setattr(governor, "KV_MEMORY", "64MiB")
    monkeypatch.setattr(governor, "TOKENS", 16)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    found = await observed.measure(str(pair.TARGET), "", 2, 0.5, 1)
    assert found["on_over_off"]["median"] > 0 and found["on_over_off_by_processor"]["median"] > 0
    assert found["requests_of_the_collector"]["/v1/traces"] > 0
