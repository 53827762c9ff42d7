"""A command that runs in the background: what it says, and its end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.forked import started

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 240.0  # only a hang can reach it
PR_SET_PDEATHSIG = 1  # linux/prctl.h

_libc = ctypes.CDLL(None)


class Process:
    """Leads a process group of its own, and dies with the thread that started it at the latest."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.command = tuple(command)
        self.said: list[str] = []
        told = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "400",
            **environment,
        }
        self._popen = started(command, told) or subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=told,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def wait_for(self, text: str, seconds: float = PATIENCE_SECONDS) -> str:
        """The first line said so far, or from now on, that holds `text`."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            over = self._popen.poll() is not None
            for line in list(self.said):
                if text in line:
                    return line
            if over:
                break
            time.sleep(0.05)
        raise AssertionError(f"{text!r} was never said by {self}")

    def wait(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Until it has ended well."""
        code = self._popen.wait(seconds)
        assert code == 0, f"ended with {code}: {self}"

    def kill(self) -> None:
        """SIGKILL to its whole group."""
        self.signal(signal.SIGKILL)
        self._popen.wait()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the whole process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, number)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def __str__(self) -> str:
        return " ".join(self.command) + "\n" + "".join(self.said[-40:])

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self.said.append(line)


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
