"""The benchmark runs, and says so itself where drafts change the text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.process
def test_speedup_runs_on_the_demo_pair(tmp_path: Path) -> None:
    kept = tmp_path / "result.json"
    command = [
        "benchmarks/speedup.py",
        "--groups",
        "2",
        "--streams",
        "2",
        "--max-tokens",
        "8",
        "--write",
        str(kept),
    ]
    ran = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads(kept.read_text())
    assert result["same_text"] is True
    assert result["speedup"]["median"] > 0
    assert len(result["groups"]) == 2
