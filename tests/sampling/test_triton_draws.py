"""The kernels that draw tokens, as far as a machine without a GPU can tell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def test_in_the_interpreter_they_give_what_a_cpu_gives() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*program, str(HERE / "interpreted_draws.py")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert re.search(r"\d+ passed", run.stdout)
