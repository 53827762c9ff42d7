"""What only one session waits for takes little from what needs the processor, whatever a grammar costs."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from outrider import grammar
from outrider.grammar import NICENESS, Grammars, Queue, _threads

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "demo/models/target/tokenizer.json"
LITERAL = "start: " + json.dumps("to be or not to be, that is what they ask " * 280)
SECONDS = 1.0  # of the processor, for work that needs it
PLACES = 4  # at a time, whose masks take milliseconds
MOST = 0.1  # of what that work had

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority"),
    pytest.mark.skipif(
        os.nice(0) + NICENESS > 19, reason="the tests give way themselves, and 19 is the most"
    ),
]


def share_of_masks() -> float:
    """Returns the processor time of the threads that find masks, over that of work beside which they ran, on
    one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    grammars, over = Grammars(TOKENIZER.read_text(), [0]), threading.Event()

    def another() -> None:
        if not over.is_set():
            grammars.place(LITERAL, (), another)

    for _ in range(PLACES):
        another()
    finding = [each for each in threading.enumerate() if each.name.startswith("grammar session")]
    clocks = [time.pthread_getcpuclockid(each.ident) for each in finding if each.ident is not None]
    began, block = sum(map(time.clock_gettime, clocks)), bytes(2**20)
    until = time.thread_time() + SECONDS
    while time.thread_time() < until:
        hashlib.sha256(block)  # as a step, it leaves Python to others
    taken = sum(map(time.clock_gettime, clocks)) - began
    over.set()
    return taken / SECONDS


def test_masks_of_long_literals_take_a_tenth_of_what_the_work_beside_them_has_at_most() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "tests.verifier.test_giving_way"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert 0 < float(told.stdout) < MOST


def test_what_a_step_waits_for_gives_way_to_nothing() -> None:
    assert _threads(Queue.STEP).submit(os.nice, 0).result() == os.nice(0)


def test_what_all_grammars_share_gives_way_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building it takes a second with a large vocabulary: half a minute, if a step's threads came first."""
    nice, ready = list[int](), threading.Event()

    def building(*told: Any, **more: Any) -> Any:
        nice.append(os.nice(0))
        return LLTokenizer(*told, **more)

    monkeypatch.setattr(grammar, "LLTokenizer", building)
    Grammars(TOKENIZER.read_text(), [0]).place('start: "a"', (), ready.set)
    assert ready.wait(60) and nice == [os.nice(0)]


if __name__ == "__main__":
    print(share_of_masks())
