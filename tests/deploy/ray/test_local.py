"""How `make cluster` ends what it started: here a process that sleeps in place of Ray, with a child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from deploy.leftovers import PREFIX, claimed_folder, remove_stale_folders
from tests.deploy.ray.conftest import PATIENCE_SECONDS, ROOT

pytestmark = [pytest.mark.process]

CLUSTER = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(6000)", sys.argv[1]], process_group=0)
print("up", flush=True)
os.read(int(sys.argv[2]), 1)
print("told to stop", flush=True)
if sys.argv[3] == "hangs":
    time.sleep(6000)
"""
COMMAND = f"""
import os, sys
from pathlib import Path
from deploy import local
from deploy.leftovers import claimed_folder
local.STOP_SECONDS = 1
with claimed_folder(Path(sys.argv[1])) as (folder, lock):
    cluster = [sys.executable, "-c", {CLUSTER!r}, f"{{folder}}/a"]
    sys.exit(local.supervise(cluster, [sys.argv[2]], os.environ, lock))
"""


class Running:
    """The command, in a process group of its own, and what it started."""

    def __init__(self, parent: Path, how: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, str(parent), how],
            cwd=ROOT,
            process_group=0,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout
        assert self.output.readline() == "up\n"
        self.started = psutil.Process(self.process.pid).children(recursive=True)
        assert len(self.started) == 2

    @property
    def left(self) -> list[psutil.Process]:
        return psutil.wait_procs(self.started, timeout=PATIENCE_SECONDS)[1]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Running]]:
    running: list[Running] = []

    def start(how: str = "") -> Running:
        running.append(Running(tmp_path, how))
        return running[-1]

    yield start
    for each in running:
        each.process.kill()
        each.process.wait()
        for process in each.started:
            if process.is_running():
                process.kill()


def folders(parent: Path) -> list[Path]:
    return list(parent.glob(f"{PREFIX}*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_group_ends_all_of_it_in_order(
    start: Callable[[], Running], tmp_path: Path, number: signal.Signals
) -> None:
    running = start()
    for _ in range(2):  # `timeout` sends two
        os.killpg(running.process.pid, number)
    assert running.output.read() == "told to stop\n"
    assert running.process.wait(PATIENCE_SECONDS) == 0
    assert running.left == [] and folders(tmp_path) == []


def test_what_does_not_stop_is_killed(start: Callable[[str], Running], tmp_path: Path) -> None:
    running = start("hangs")
    running.process.terminate()
    assert running.process.wait(PATIENCE_SECONDS) == 0
    assert running.left == [] and folders(tmp_path) == []
    assert "it did not stop in 1 seconds and is killed" in running.output.read()


def test_a_cluster_that_is_killed_is_told_and_leaves_nothing(
    start: Callable[[], Running], tmp_path: Path
) -> None:
    running = start()
    running.started[0].kill()
    assert running.process.wait(PATIENCE_SECONDS) == 1
    assert running.left == [] and folders(tmp_path) == []
    assert running.output.read() == "outrider cluster: it was killed by signal 9\n"


def test_the_death_of_the_command_is_the_wish_to_stop(start: Callable[[], Running]) -> None:
    running = start()
    running.process.kill()
    assert running.output.readline() == "told to stop\n"


def test_the_next_start_clears_what_a_kill_left(start: Callable[[], Running], tmp_path: Path) -> None:
    """But nothing that is in use, and nothing that is none of it."""
    used = start()
    killed = start()
    other = tmp_path / f"{PREFIX}other"
    other.mkdir()  # has no lock
    (tmp_path / f"{PREFIX}link").symlink_to(other)
    for process in (killed.process, killed.started[0]):
        process.kill()
        process.wait()
    with claimed_folder(tmp_path) as (folder, _):
        remove_stale_folders(tmp_path)
        assert folder.is_dir() and other.is_dir()
    assert killed.left == []
    assert len(folders(tmp_path)) == 3, "the one that is in use, and two that are no cluster's"
    assert used.process.poll() is None and all(process.is_running() for process in used.started)
