"""Of processes that end one after the other, the leader names the one that was first."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from outrider.engine.ranks import Place
from outrider.errors import PeerLost
from outrider.options.engine import EngineOptions
from outrider.worker import followers
from outrider.worker.followers import AFTER_ANOTHER, FollowerProcesses, FollowerSpec


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("os.kill(os.getpid(), 9)", r"follower 2 .* killed by signal 9"),
        ("sys.exit(1)", r"follower 2 .* ended with exit code 1"),
        (f"sys.exit({AFTER_ANOTHER})", r"follower 1 .* ended as another process"),
    ],
)
def test_the_follower_that_ended_first_is_named(end: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end may be told after that of one that only followed it."""
    programs = {1: f"sys.exit({AFTER_ANOTHER})", 2: f"sys.stdin.read(); {end}"}

    def start(spec: FollowerSpec) -> subprocess.Popen[bytes]:
        program = f"import os, sys; {programs[spec.group.rank]}"
        return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)

    monkeypatch.setattr(followers, "_start", start)
    specs = [FollowerSpec(Place(rank, 3, "127.0.0.1", 1), "", EngineOptions()) for rank in programs]
    running = FollowerProcesses(specs)
    first, other = running._processes.values()
    first.wait()
    assert other.stdin is not None
    ending = threading.Timer(0.1, other.stdin.close)
    ending.start()
    with pytest.raises(PeerLost, match=told):
        running.check()
    ending.join()
    running.stop()
