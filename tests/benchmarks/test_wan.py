"""The benchmark runs, and says so itself where the line changes the text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.namespace import missing

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.netns
def test_wan_runs_on_the_demo_pair(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    kept = tmp_path / "result.json"
    command = [
        "benchmarks/wan.py",
        *("--groups", "2", "--streams", "2", "--max-tokens", "8", "--write", str(kept)),
    ]
    ran = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads(kept.read_text())
    assert result["same_text"] is True
    assert result["far_over_plain"]["median"] > 0
    assert len(result["groups"]) == 2
