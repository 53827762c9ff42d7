"""Hosts leave nothing behind, even where the run that made them was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import Eventually
from tests.cluster.hosts import Host, switched
from tests.cluster.namespace import FOLDER, remove_leftovers
from tests.cluster.process import ROOT

pytestmark = pytest.mark.netns

RUN = """
import time
from tests.cluster.hosts import switched
with switched("one", "two") as hosts:
    hosts["one"].start("setsid", "--fork", "sh", "-c", "echo $$ > " + {note!r} + "; exec sleep 1000")
    time.sleep(1000)
"""


def test_runs_side_by_side_do_not_meet(hosts: dict[str, Host]) -> None:
    """In one process, and under the same names."""
    with switched(*hosts) as others:
        namespaces = {host.namespace for made in (hosts, others) for host in made.values()}
        assert len(namespaces) == 2 * len(hosts)
        assert {host.switch for host in others.values()}.isdisjoint(host.switch for host in hosts.values())
    assert all((FOLDER / host.namespace).exists() for host in hosts.values())
    assert not any((FOLDER / host.namespace).exists() for host in others.values())


def test_what_a_killed_run_has_left_is_removed(
    hosts: dict[str, Host], tmp_path: Path, eventually: Eventually
) -> None:
    note = tmp_path / "pid"
    run = subprocess.Popen([sys.executable, "-c", RUN.format(note=str(note))], cwd=ROOT)
    eventually(lambda: note.exists() and note.read_text() != "", "the run made its hosts")
    run.kill()
    run.wait()
    left = psutil.Process(int(note.read_text()))
    assert len(list(FOLDER.glob(f"outrider-{run.pid}-*"))) == 3
    remove_leftovers()
    assert list(FOLDER.glob(f"outrider-{run.pid}-*")) == []
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE
    assert all((FOLDER / host.namespace).exists() for host in hosts.values()), "a live run's were removed"
