"""The measurements of overload and of memory run, on a tiny pair."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import soak
from benchmarks.soak import MIB, slope
from tests.benchmarks.whole import whole
from tests.tiny_models import build

ROOT = Path(__file__).parents[2]


def measured(tmp_path: Path, benchmark: str, *options: str) -> Any:
    target, draft = build("llama", tmp_path / "target"), build("llama", tmp_path / "draft")
    written = tmp_path / "result.json"
    command = [f"benchmarks/{benchmark}.py", "--target", str(target), "--draft", str(draft), *options]
    run = subprocess.run(
        [sys.executable, *command, "--write", str(written)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(written.read_text())


@whole
@pytest.mark.process
def test_overload_runs_and_reports(tmp_path: Path) -> None:
    result = measured(tmp_path, "overload", "--draft", "", "--max-tokens", "8", "--seconds", "1")
    assert result["capacity_sessions"] >= 1
    assert result["at_capacity"]["accepted"] > 0 and result["at_capacity"]["refused"] == 0
    overload = result["overload"]
    assert overload["accepted"] > 0 and overload["failed"] == 0
    assert overload["accepted"] + overload["refused"] == overload["requests"]


@whole
@pytest.mark.process
def test_the_soak_runs_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "SAMPLE_SECONDS", 0.1)  # ten of them are enough for a slope
    target, draft = build("llama", tmp_path / "target"), build("llama", tmp_path / "draft")
    written = tmp_path / "result.json"
    soak.main(
        str(target), str(draft), 0.12, quick=2, slow=1, vanishing=1, max_tokens=16, seed=1, write=written
    )
    result = json.loads(written.read_text())
    assert result["answers"]["quick 200"] > 0 and result["answers"]["vanished"] > 0
    assert result["clients_failed"] == []
    assert set(result["processes"]) == {"router", "verifier", "drafter"}
    assert all(one["last_mib"] > 0 for one in result["processes"].values())


def test_growth_is_told_from_noise() -> None:
    seconds = [float(second) for second in range(1800)]
    noisy = [500 * MIB + (37 * second % 11) * MIB / 4 for second in range(1800)]
    flat = slope(seconds, noisy)
    assert flat["flat"] and abs(flat["slope_mib_an_hour"]) < 5
    growing = slope(seconds, [value + second * MIB / 36 for second, value in enumerate(noisy)])
    assert not growing["flat"]
    low, high = growing["confidence_95_mib_an_hour"]
    assert low <= 100 <= high
