"""The benchmark starts a cluster, and tells when each stage was reached. The figures are not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.namespace import missing

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.netns
@pytest.mark.ray
def test_coldstart_starts_the_demo_pair(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    kept = tmp_path / "result.json"
    command = ["benchmarks/coldstart.py", "--runs", "1", "--write", str(kept)]
    ran = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads(kept.read_text())
    [stages] = result["starts"]
    assert 0 < stages["cluster_up"] < stages["all_pools_serving"] < stages["first_answer"]
