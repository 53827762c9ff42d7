"""The measurement of drafts that rest, in one case, tiny."""

from __future__ import annotations

import pytest

from benchmarks import governor
from demo import pair
from tests.benchmarks.whole import whole


@whole
async def test_a_case_is_measured_against_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(governor, "CASES", (governor.Case("both", 2, 0.0, trouble=governor.throttled),))
    monkeypatch.setattr(governor, "LEAD_SECONDS", 0.5)
    monkeypatch.setattr(governor, "KV_MEMORY", "32MiB")
    (row,) = await governor.measure(str(pair.TARGET), str(pair.DRAFT), 0.5, 0.5, 1)
    assert row["streams"] == 2 and len(row["tokens_per_second"]["plain"]) == 1
    assert row["over_plain"]["least"] == row["over_plain"]["median"] > 0
