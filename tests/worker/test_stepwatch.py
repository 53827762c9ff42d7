"""Signs of life: what counts as silence, and what as a step that hangs."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from outrider.errors import StepHung
from outrider.net.heartbeat import Stillness, fell_silent
from outrider.worker.stepwatch import Pulse, StepWatch, under_way, watched

ROOT = Path(__file__).resolve().parents[2]


def test_stillness_is_counted_in_ticks_since_the_last_move() -> None:
    still = Stillness(0.25)
    assert [still.tick() for _ in range(3)] == [0.25, 0.5, 0.75]
    still.moved()
    assert still.tick() == 0.25


async def test_who_fell_silent_is_not_listened_to_any_more() -> None:
    ended: list[str] = []

    async def reading() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("reading")

    assert await fell_silent(reading(), Stillness(1.0))
    assert ended == ["reading"]


def pulses(watch: StepWatch, step: object, ticks: int) -> list[Pulse]:
    return [watch.tick(step) for _ in range(ticks)]  # type: ignore[arg-type]


def test_a_step_is_overdue_and_then_given_up() -> None:
    watch, step = StepWatch(1.0), under_way(0.001)  # 2 seconds at least
    assert pulses(watch, step, 8) == [
        *[Pulse.WELL] * 2,  # it had just begun at the first tick
        *[Pulse.OVERDUE] * 4,
        *[Pulse.HUNG] * 2,
    ]


def test_what_is_expected_to_take_long_may_take_long() -> None:
    assert pulses(StepWatch(1.0), under_way(0.5), 5)[-2:] == [Pulse.WELL, Pulse.OVERDUE]  # 8 x 0.5
    assert set(pulses(StepWatch(1.0), under_way(None), 30)) == {Pulse.WELL}


def test_steps_that_come_and_go_are_well_however_many() -> None:
    watch, step = StepWatch(1.0), under_way(0.001)
    assert pulses(watch, step, 3)[-1] is Pulse.OVERDUE
    assert watch.tick(under_way(0.001)) is Pulse.WELL  # another one: that one has ended after all
    assert {watch.tick(under_way(0.001)) for _ in range(10)} == {Pulse.WELL}
    assert {watch.tick(None) for _ in range(10)} == {Pulse.WELL}
    one, other = under_way(0.001), under_way(0.001)
    assert pulses(watch, one, 2) + pulses(watch, other, 3) == [Pulse.WELL] * 4 + [Pulse.OVERDUE]


async def test_steps_that_hang_are_not_waited_for() -> None:
    go_on, hangs = threading.Event(), asyncio.Event()

    async def steps() -> None:
        hangs.set()
        try:
            await asyncio.to_thread(go_on.wait)
        finally:
            await asyncio.to_thread(go_on.wait)  # nor what they do at their end

    async def watching() -> None:
        await hangs.wait()
        raise StepHung("it hangs")

    try:
        with pytest.raises(StepHung):
            await watched(steps(), watching())
    finally:
        go_on.set()


async def test_who_is_stopped_stops_the_steps_and_the_watch() -> None:
    ended: list[str] = []
    begun = asyncio.Semaphore(0)

    async def forever(name: str) -> None:
        try:
            begun.release()
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    running = asyncio.create_task(watched(forever("steps"), forever("watch")))
    for _ in range(2):
        await begun.acquire()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(ended) == ["steps", "watch"]


async def test_the_end_of_the_steps_is_the_end_of_the_watch() -> None:
    ended = asyncio.Event()

    async def steps() -> None:
        raise RuntimeError("a mistake")

    async def watching() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(RuntimeError, match="a mistake"):
        await watched(steps(), watching())
    assert ended.is_set()


WATCHED = """
import asyncio, threading
from outrider.worker import stepwatch

stepwatch.UNKNOWN_SECONDS = 1.0  # 3 until it hangs

async def main():
    with stepwatch.loop_watched("tester"):
        print(await asyncio.to_thread(input), flush=True)
        print(await asyncio.to_thread(input), flush=True)
        threading.Event().wait()

asyncio.run(main())
"""


def test_a_loop_that_stands_still_is_noticed_and_a_process_that_was_stopped_is_no_such_loop() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WATCHED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdin is not None and process.stdout is not None
    with process, process.stdin as say, process.stdout as said:
        print("begun", file=say, flush=True)
        assert said.readline() == "begun\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(4.0)
        process.send_signal(signal.SIGCONT)
        print("here still", file=say, flush=True)
        assert said.readline() == "here still\n"
        assert process.wait(120) == 1
