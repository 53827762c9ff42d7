"""A process that does not outlive the one that started it."""

from __future__ import annotations

import subprocess
import sys


def test_a_follower_looks_for_its_leader_before_anything_else() -> None:
    """It heeds no signal, and imports take seconds: dozens had lived on whose leader had gone meanwhile."""
    command = (sys.executable, "-m", "outrider.worker.follower", "1", "nonsense, which is not read")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "")
