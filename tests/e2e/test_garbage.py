"""What the garbage collector of each process goes through while it serves."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import start

pytestmark = pytest.mark.process

AT_EXIT = """
import atexit, gc, sys
from pathlib import Path

def tell():
    role = next((one for one in ("router", "verifier", "drafter") if one in sys.argv[1:2]), "other")
    (Path(__file__).parent / role).write_text(f"{gc.get_freeze_count()} {len(gc.get_objects())}")

atexit.register(tell)
"""


def test_its_full_rounds_pass_over_what_was_there_before_it_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(AT_EXIT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    serve = start()
    serve.process.send_signal(signal.SIGINT)
    assert serve.process.wait(30) == 0, "".join(serve.said[-30:])
    for role in ("router", "verifier", "drafter"):
        passed_over, left = (int(count) for count in (tmp_path / role).read_text().split())
        assert passed_over > 10 * left, (role, passed_over, left)
