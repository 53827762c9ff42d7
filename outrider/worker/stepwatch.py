"""Tells when a step of a model takes so long that it hangs.

A hanging step is in a kernel or in a collective, and cannot be ended from here. First it counts as overdue,
which may be a false alarm. If it still runs long after that, only a new process helps.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

from outrider.net.heartbeat import HEARTBEAT_SECONDS, Stillness
from outrider.net.tasks import cancel

LEAST_SECONDS = 2.0  # less is no hang, whatever was expected: the machine may be busy with something else
TIMES_EXPECTED = 8.0
UNKNOWN_SECONDS = 30.0  # if nothing is known of a step
TIMES_OVERDUE = 3.0  # of the time at which a step is overdue, before it is given up


@dataclass(frozen=True, slots=True, eq=False)
class StepUnderWay:
    """A step that an engine runs. Steps are compared by identity."""

    overdue_seconds: float  # after which it takes longer than it should


def under_way(expected_seconds: float | None = None) -> StepUnderWay:
    """Returns a step that begins now. `expected_seconds` is None if nothing is known of it."""
    if expected_seconds is None:
        return StepUnderWay(UNKNOWN_SECONDS)
    return StepUnderWay(max(LEAST_SECONDS, TIMES_EXPECTED * expected_seconds))


class Pulse(Enum):
    """The state of an engine, judged by its steps."""

    WELL = "well"
    OVERDUE = "overdue"  # the step takes longer than it should
    HUNG = "hung"  # it will not end any more


class StepWatch:
    """Judges a step by the ticks that it lasts. Pure."""

    def __init__(self, tick_seconds: float) -> None:
        self._still = Stillness(tick_seconds)
        self._step: StepUnderWay | None = None

    def tick(self, step: StepUnderWay | None) -> Pulse:
        """Notes which step runs now, None if none does, and returns its state."""
        if step is None or step is not self._step:
            self._step = step
            self._still.moved()
            return Pulse.WELL
        seconds = self._still.tick()
        if seconds < step.overdue_seconds:
            return Pulse.WELL
        return Pulse.OVERDUE if seconds < TIMES_OVERDUE * step.overdue_seconds else Pulse.HUNG


async def watched(steps: Coroutine[Any, Any, None], watching: Coroutine[Any, Any, None]) -> None:
    """Runs an engine's steps, and the coroutine that watches them, until either ends. Raises what that one
    raised.

    If the watch ends first, the steps are left alone: they hang, and waiting for their end would hang too.
    """
    stepping, watch = asyncio.create_task(steps), asyncio.create_task(watching)
    try:
        done, _ = await asyncio.wait((stepping, watch), return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        await cancel([stepping, watch])
        raise
    if watch not in done:
        await cancel([watch])
    for task in done:
        task.result()


@contextmanager
def loop_watched(role: str) -> Iterator[None]:
    """Watches the running event loop from a thread. The thread ends the process if the loop stands still
    for as long as an unknown step may take. No task of the loop could notice that, because short steps run
    on its own thread."""
    loop, over, turn = asyncio.get_running_loop(), threading.Event(), under_way()

    def go_round() -> None:
        nonlocal turn
        turn = under_way()

    def watch() -> None:
        turns = StepWatch(HEARTBEAT_SECONDS)
        while not over.wait(HEARTBEAT_SECONDS):
            if turns.tick(turn) is Pulse.HUNG:
                faulthandler.dump_traceback()
                why = "its event loop stands still; this process can only be replaced"
                end_process(f"outrider {role}: {why}")
            loop.call_soon_threadsafe(go_round)

    thread = threading.Thread(target=watch, name="loop watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def end_process(last_words: str) -> NoReturn:
    """Ends the process with exit code 1, and with it the thread that hangs. The interpreter's own end
    would wait for that thread."""
    print(last_words, file=sys.stderr, flush=True)
    os._exit(1)
