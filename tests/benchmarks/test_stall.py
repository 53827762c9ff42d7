"""The measurement of stalls runs, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import stall
from tests.tiny_models import build


def test_it_runs_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall.meter, "LONGEST_STEP", stall.meter.LONGEST_STEP)  # it changes it
    target = build("llama", tmp_path / "target", max_position_embeddings=256)
    written = tmp_path / "result.json"
    stall.main(str(target), prompt_tokens=300, streams=2, prefill_chunk=64, write=written)
    result = json.loads(written.read_text())
    for chunks in ("cut by what a step takes", "of 64"):
        found = result[chunks]
        longest, median = found["longest_gap_milliseconds"], found["median_gap_milliseconds"]
        assert longest > 0 and median > 0 and found["longest_over_median"] == pytest.approx(longest / median)
        assert found["seconds_to_read"] > 0
