"""A process of its own for what a router does not trust itself with: it is asked in lines of JSON, and
answers each with one. It ends with its parent, and another begins where it has ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from outrider.errors import Unavailable

ENDING_SECONDS = 5.0  # in which a process that says no more has ended
FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""Signals that no limit of its own sends: who is ended by one is not at fault, nor is what it was asked."""
TRIES = 3  # of what somebody else has ended


class EndedFromOutside(Exception):
    """Somebody has ended the process: nobody knows what it would have said."""


class LineProcess:
    """Runs a module. Its first line is what it is made of; that has an answer, too."""

    def __init__(self, module: str, made_of: object) -> None:
        self._module, self._made_of = module, json.dumps(made_of)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def begin(self) -> dict[str, Any] | None:
        """Begins a process, and returns what it answers to what it is made of. Else as `ask`."""
        return self._tried(self._begin)

    def ask(self, line: str) -> dict[str, Any] | None:
        """Returns the answer to a line of JSON; None if the process has ended by it. One asks at a time. If
        somebody else has ended the process, another is asked. Raises Unavailable if that goes on."""

        def asked() -> dict[str, Any] | None:
            if self._process is None:
                begun = self._begin()
                if begun is None or "refused" in begun:
                    return begun
            return self._said(line)

        return self._tried(asked)

    def _tried(self, asked: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        with self._lock:
            for _ in range(TRIES):
                with suppress(EndedFromOutside):
                    return asked()
        raise Unavailable("a process that this request needs was ended from outside; send it again")

    def _begin(self) -> dict[str, Any] | None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            text=True,
            encoding="utf-8",
            start_new_session=True,  # a signal to the router's group is not meant for it
        )
        self._end = weakref.finalize(self, _end, self._process)
        return self._said(self._made_of)

    def _said(self, line: str) -> dict[str, Any] | None:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer: dict[str, Any] = json.loads(process.stdout.readline())
            return answer
        except (OSError, ValueError):  # an unfinished line is no JSON
            self._process = None
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_SECONDS)
            code = process.poll()
            self._end()
            if code is not None and -code in FROM_OUTSIDE:
                raise EndedFromOutside from None
            return None


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
