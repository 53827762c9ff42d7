"""The benchmark's dry run on a CPU goes through all that it does on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_report import goals

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/gpu.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)


def test_the_dry_run_measures_everything(tmp_path: Path) -> None:
    kept = tmp_path / "result.json"
    ran = run("--device", "cpu", "--no-fuse", "--drafts", "3", "--write", str(kept))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads(kept.read_text())
    assert result["exactness"]["share_of_tokens_as_generate"] == 1.0
    assert result["exactness"]["texts_as_without_drafts"] == 1.0
    assert list(result["curve"]) == ["1", "2", "4"]
    assert result["target"]["kernel"] == "reference"
    assert result["single_stream"]["bytes"] > 2 * 199 * 64
    assert {case["kernel"] for case in result["attention"]} == {"reference"}
    for found in result["batches"].values():
        assert found["plain"]["tokens_per_step"] == 1.0
        assert 1.0 < found["drafts"]["tokens_per_step"] <= 4.0
    assert "share of copy bandwidth" in ran.stdout


def test_goals_are_judged() -> None:
    single = {"share_of_copy_bandwidth": 0.81, "host_gap": 0.06}
    result = {"single_stream": single, "exactness": {"share_of_tokens_as_generate": 0.99}}
    assert [met for _, _, _, met in goals(result)] == [True, False, True]


def test_without_a_gpu_it_ends_in_a_sentence() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    ran = run()
    assert ran.returncode == 1
    assert "there is no CUDA device here" in ran.stderr and "Traceback" not in ran.stderr
