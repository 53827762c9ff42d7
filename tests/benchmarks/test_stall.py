"""The measurement of stalls runs, on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.tiny_models import build

ROOT = Path(__file__).parents[2]


def test_it_runs_and_reports(tmp_path: Path) -> None:
    target = build("llama", tmp_path / "target", max_position_embeddings=256)
    written = tmp_path / "result.json"
    command = ["benchmarks/stall.py", "--target", str(target), "--write", str(written)]
    command += ["--prompt-tokens", "300", "--streams", "2", "--prefill-chunk", "64"]
    run = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    result = json.loads(written.read_text())
    for chunks in ("cut by what a step takes", "of 64"):
        assert result[chunks]["longest_over_median"] >= 1
        assert result[chunks]["seconds_to_read"] > 0
