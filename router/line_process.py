"""A process of its own for what a router does not trust itself with: it is asked in lines of JSON, and
answers each with one. It ends with its parent, and another begins where it has ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from typing import Any


class LineProcess:
    """Runs a module. Its first line is what it is made of; that has an answer, too."""

    def __init__(self, module: str, made_of: object) -> None:
        self._module, self._made_of = module, made_of
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def begin(self) -> dict[str, Any] | None:
        """Begins a process, and returns what it answers to what it is made of; None if it has ended."""
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

    def ask(self, what: object) -> dict[str, Any] | None:
        """Returns the answer; None if the process has ended. One asks at a time."""
        with self._lock:
            if self._process is None:
                begun = self.begin()
                if begun is None or "refused" in begun:
                    return begun
            return self._said(what)

    def _said(self, what: object) -> dict[str, Any] | None:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(what) + "\n")
            process.stdin.flush()
            answer: dict[str, Any] = json.loads(process.stdout.readline())
            return answer
        except (OSError, ValueError):  # an unfinished line is no JSON
            self._end()
            self._process = None
            return None


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
