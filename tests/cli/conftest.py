from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent
PATIENCE_SECONDS = 120.0  # how long a test waits for what must happen; never a measure of speed


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[[Callable[[], bool], str], None]:
    return eventually


class Folder:
    """Where the stand-ins leave their notes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pids(self, role: str = "*") -> list[int]:
        return sorted(int(note.name.split(".")[1]) for note in self.path.glob(f"{role}.*.pid"))

    def living(self, role: str) -> int:
        return next(pid for pid in self.pids(role) if alive(pid))

    def signals(self, role: str = "*") -> set[str]:
        return {note.suffix[1:] for note in self.path.glob(f"{role}.*.SIG*")}

    def gone(self, role: str) -> bool:
        return not any(alive(pid) for pid in self.pids(role))

    def none_left(self) -> bool:
        return self.gone("*")


@pytest.fixture
def notes(tmp_path: Path) -> Iterator[Folder]:
    folder = Folder(tmp_path)
    yield folder
    for pid in folder.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)


class FakeServe:
    """`outrider serve` in a process of its own, in a process group as a terminal would make it."""

    def __init__(self, folder: Folder, router: str, verifier: str, drafter: str) -> None:
        self.log = folder.path / "serve.log"
        command = [sys.executable, str(HERE / "fake_serve.py"), str(folder.path), router, verifier, drafter]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(HERE.parent.parent)},
            )

    def output(self) -> str:
        return self.log.read_text()

    def until_printed(self, text: str) -> None:
        eventually(lambda: text in self.output() or self.process.poll() is not None, f"printed {text!r}")
        assert text in self.output()

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE_SECONDS)


@pytest.fixture
def serve(notes: Folder) -> Iterator[Callable[..., FakeServe]]:
    started: list[FakeServe] = []

    def start(router: str = "serves", verifier: str = "serves", drafter: str = "serves") -> FakeServe:
        started.append(FakeServe(notes, router, verifier, drafter))
        return started[-1]

    yield start
    for fake in started:
        if fake.process.poll() is None:
            fake.process.kill()
            fake.process.wait()
