"""The supervisor with real child processes; only what they do is made up."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_cli import supervisor
from outrider_cli.supervisor import ChildDied, ChildSpec, Supervisor, restart_delay

FAKE = str(Path(__file__).with_name("fake_role.py"))


class Record:
    """A display that remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self.became_ready: list[str] = []

    def starting(self, name: str) -> None:
        pass

    def ready(self, name: str) -> None:
        self.became_ready.append(name)

    def line(self, name: str, text: str) -> None:
        self.lines.append((name, text))

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
async def record() -> Record:
    return Record()


@pytest.fixture
async def parent(record: Record) -> AsyncIterator[Supervisor]:
    running = Supervisor(record)
    yield running
    await running.stop()


@pytest.fixture
def fake(notes: Any) -> Callable[..., ChildSpec]:
    def spec(role: str, behaviour: str = "serves", name: str | None = None) -> ChildSpec:
        command = (sys.executable, FAKE, role, str(notes.path), behaviour)
        return ChildSpec(role, name or role, command, restart=role != "router")

    return spec


def python(program: str, role: str = "verifier") -> ChildSpec:
    return ChildSpec(role, role, (sys.executable, "-c", program), restart=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110  (processes and files raise no event of this loop)
            await asyncio.sleep(0.02)


async def test_a_child_is_ready_when_it_says_so(parent: Supervisor, record: Record, fake: Any) -> None:
    assert await parent.start(fake("router")) == "http://127.0.0.1:8000 (gRPC 127.0.0.1:50051)"
    assert record.became_ready == ["router"]
    assert [name for name, _ in record.lines] == ["router", "router"]


async def test_workers_start_side_by_side(parent: Supervisor, record: Record, tmp_path: Path) -> None:
    # Each says that it is ready only once the other runs: one after the other would never end.
    program = (
        "import sys, time, pathlib; me, other = sys.argv[1:]; pathlib.Path(me).touch()\n"
        "while not pathlib.Path(other).exists(): time.sleep(.01)\n"
        "print('outrider verifier ready: here'); time.sleep(600)"
    )
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    specs = [
        ChildSpec("verifier", f"verifier-{i}", (sys.executable, "-c", program, *order), restart=True)
        for i, order in enumerate((paths, paths[::-1]))
    ]
    async with asyncio.timeout(120):
        await parent.start_all(specs)
    assert sorted(record.became_ready) == ["verifier-0", "verifier-1"]


async def test_the_last_starts_once_the_others_are_ready(
    parent: Supervisor, record: Record, tmp_path: Path
) -> None:
    program = (
        "import sys, time, pathlib; me, other = sys.argv[1:]; time.sleep(.5); pathlib.Path(me).touch()\n"
        "print('outrider', 'drafter' if pathlib.Path(other).exists() else 'verifier', 'ready: here')\n"
        "time.sleep(600)"
    )
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    commands = [(sys.executable, "-c", program, *order) for order in (paths, paths[::-1])]
    drafter = ChildSpec("drafter", "drafter", commands[0], True, last=True)
    async with asyncio.timeout(120):
        await parent.start_all([drafter, ChildSpec("verifier", "verifier", commands[1], True)])
    assert record.became_ready == ["verifier", "drafter"]


async def test_a_death_before_ready_is_told_in_the_childs_own_words(parent: Supervisor, fake: Any) -> None:
    with pytest.raises(ChildDied) as death:
        await parent.start_all([fake("drafter", "hangs"), fake("verifier", "refuses")])
    assert str(death.value) == (
        "verifier ended before it was ready: exit code 1: outrider verifier: the checkpoint is damaged"
    )


async def test_a_traceback_is_told_by_its_last_line(parent: Supervisor) -> None:
    with pytest.raises(ChildDied, match="exit code 1: ZeroDivisionError: division by zero"):
        await parent.start(python("1 / 0"))


async def test_a_command_that_cannot_be_run_leaves_nothing(parent: Supervisor, notes: Any, fake: Any) -> None:
    await parent.start(fake("router"))
    with pytest.raises(FileNotFoundError):
        await parent.start(ChildSpec("verifier", "verifier", ("/nowhere/at/all",), restart=True))
    await parent.stop()
    assert notes.none_left()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_a_dead_worker_is_restarted(
    parent: Supervisor, record: Record, notes: Any, fake: Any, number: int
) -> None:
    await parent.start(fake("verifier"))
    (first,) = notes.pids("verifier")
    os.kill(first, number)
    await until(lambda: len(record.became_ready) == 2)
    assert len(notes.pids("verifier")) == 2
    assert record.notes == [
        f"verifier died (killed by signal {number:d} ({signal.strsignal(number)})); restarting it in 0.5 s"
    ]


async def test_a_worker_that_keeps_dying_stops_everything(
    parent: Supervisor, notes: Any, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_SECONDS", 0.01)
    await parent.start(fake("verifier", "crashes"))
    with pytest.raises(ChildDied, match=r"verifier died more than 3 times in 60 s: exit code 3"):
        async with asyncio.timeout(120):
            await parent.failed()
    assert len(notes.pids("verifier")) == 4


async def test_the_routers_death_is_not_repaired(parent: Supervisor, notes: Any, fake: Any) -> None:
    await parent.start(fake("router"))
    await parent.start(fake("verifier"))
    os.kill(notes.pids("router")[0], signal.SIGKILL)
    with pytest.raises(ChildDied, match="router died: killed by signal 9"):
        async with asyncio.timeout(120):
            await parent.failed()
    await parent.stop()
    assert notes.none_left()
    assert len(notes.pids("router")) == 1


async def test_stop_asks_first_and_then_insists(
    parent: Supervisor, notes: Any, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STOP_GRACE_SECONDS", 0.3)
    await parent.start_all([fake("verifier", "stubborn"), fake("drafter")])
    await parent.stop()
    assert notes.signals("verifier") == notes.signals("drafter") == {"SIGTERM"}
    assert notes.none_left()


async def test_a_child_is_given_its_time_to_drain_beyond_the_grace(
    parent: Supervisor, notes: Any, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STOP_GRACE_SECONDS", 0.3)
    draining = replace(fake("verifier", "drains"), drain_seconds=1000.0)
    await parent.start_all([draining, fake("drafter", "stubborn")])
    stopping = asyncio.create_task(parent.stop())
    await until(lambda: notes.gone("drafter"))  # killed after the grace
    assert notes.living("verifier") and not stopping.done()
    notes.path.joinpath("drained").touch()
    await stopping
    assert notes.none_left() and notes.signals("verifier") == {"SIGTERM"}


async def test_kill_ends_the_wait_for_those_that_drain(parent: Supervisor, notes: Any, fake: Any) -> None:
    await parent.start(replace(fake("verifier", "drains"), drain_seconds=1000.0))
    stopping = asyncio.create_task(parent.stop())
    await until(lambda: notes.signals("verifier") == {"SIGTERM"})
    parent.kill()
    await stopping
    assert notes.none_left()


async def test_stop_in_the_middle_of_a_start(parent: Supervisor, notes: Any, fake: Any) -> None:
    starting = asyncio.create_task(parent.start_all([fake("verifier", "hangs"), fake("drafter", "hangs")]))
    await until(lambda: len(notes.pids()) == 2)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await parent.stop()
    assert notes.none_left()


async def test_stop_while_a_restart_is_due(parent: Supervisor, record: Record, notes: Any, fake: Any) -> None:
    await parent.start(fake("verifier"))
    os.kill(notes.pids("verifier")[0], signal.SIGKILL)
    await until(lambda: len(record.notes) == 1)
    await parent.stop()
    await asyncio.sleep(0.7)  # past the restart that was due
    assert len(notes.pids("verifier")) == 1


async def test_every_kind_of_output_is_forwarded(parent: Supervisor, record: Record) -> None:
    program = (
        "import sys, time; w = sys.stdout.buffer.write\n"
        "w(b'load 10%\\rload 90%\\rload 100%\\n'); w(b'\\xff caf\\xc3\\xa9\\n'); w(b'x' * 300_000 + b'\\n')\n"
        "print('to stderr', file=sys.stderr); w(b'outrider verifier ready: here\\n'); w(b'no end')\n"
    )
    assert await parent.start(python(program)) == "here"
    await until(lambda: ("verifier", "no end") in record.lines)
    texts = [text for _, text in record.lines]
    assert texts[0] == "load 100%"
    assert texts[1] == "� café"
    assert "".join(text for text in texts if set(text) == {"x"}) == "x" * 300_000
    assert "to stderr" in texts


@given(st.lists(st.floats(0, 1000), max_size=10), st.floats(0, 100))
def test_restart_delay_grows_and_ends(ages: list[float], step: float) -> None:
    now = 1000.0
    deaths = [now - age for age in ages]
    recent = sum(age < 60 for age in ages)
    delay = restart_delay(deaths, now)
    assert (delay is None) == (recent > 3)
    if delay is not None:
        assert delay == 0.5 * 2 ** max(recent - 1, 0)
        assert restart_delay(deaths, now + step) is not None  # time heals
