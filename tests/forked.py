"""Processes that start at once: forked from one that has imported what a worker needs.

Importing torch and transformers takes four seconds of a core, and the tests start some fifty workers, and
programs of a few lines. What is forked is a process like any other, with signals, a session and an end of its
own, but not with a command line that the system would show. That workers start from nothing is seen wherever
`outrider serve` starts them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO

from outrider.worker.garbage import spared_imports

ROOT = Path(__file__).resolve().parents[1]
IMPORTED = (
    "verifier.service",
    "drafter.service",
    "router.service",
    "outrider.worker.follower",
    "outrider_cli.app",
)
ENTER = ("ip", "netns", "exec")
NAMESPACES = Path("/var/run/netns")
CLONE_NEWNET = 0x40000000  # linux/sched.h
LONGEST = 2**17  # bytes of a message
PATIENCE_SECONDS = 240.0  # only a hang can reach it


class Forked:
    """What the tests use of subprocess.Popen."""

    def __init__(self, stdin: IO[str], stdout: IO[str]) -> None:
        self.pid, self.stdin, self.stdout = 0, stdin, stdout
        self.returncode: int | None = None
        self._over = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._over.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def end(self, code: int) -> None:
        """It has ended, as `returncode` of a Popen would say."""
        self.returncode = code
        self._over.set()


class Parent:
    """The process that forks. It ends with this one, and all that it has forked ends with it."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(theirs.fileno())],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self.pid = self._process.pid
        self._turn = threading.Lock()
        self._asked: Forked | None = None
        self._children: dict[int, Forked] = {}
        self._heard = threading.Condition()
        threading.Thread(target=self._hear, daemon=True).start()

    def fork(
        self,
        module: Sequence[str],
        environment: Mapping[str, str],
        namespace: str | None = None,
        errors: bool = False,
    ) -> Forked:
        """Runs a module with arguments as `python -m` does, or a program as `python -c` does if the first is
        "-c", in a network namespace if one is named. `errors`: whether its stdout has what it says to
        stderr."""
        stdin, to_it = os.pipe()
        from_it, stdout = os.pipe()
        asked = json.dumps([list(module), dict(environment), namespace, errors]).encode()
        made = Forked(os.fdopen(to_it, "w"), os.fdopen(from_it))
        with self._turn, self._heard:
            self._asked = made
            socket.send_fds(self._control, [asked], [stdin, stdout])
            assert self._heard.wait_for(lambda: made.pid, PATIENCE_SECONDS), "nothing was forked"
        os.close(stdin)
        os.close(stdout)
        return made

    def _hear(self) -> None:
        while message := self._control.recv(LONGEST):
            pid, code = json.loads(message)
            with self._heard:
                if code is not None:
                    self._children.pop(pid).end(code)
                elif self._asked is not None:
                    self._asked.pid, self._children[pid] = pid, self._asked
                    self._heard.notify_all()
        for child in self._children.values():  # the kernel has killed them, with what forked them
            child.end(-signal.SIGKILL)


@cache
def parent() -> Parent:
    """The one of this process."""
    return Parent()


def started(command: Sequence[str], environment: Mapping[str, str]) -> Forked | None:
    """Runs the command of a role, if it is one; its stdout has all that it says. It leads a session."""
    namespace, rest = None, list(command)
    if tuple(rest[:3]) == ENTER:
        namespace, rest = rest[3], rest[4:]
    if rest[:3] != [sys.executable, "-m", "outrider_cli"] or rest[3] not in ("verifier", "drafter", "router"):
        return None
    return parent().fork(rest[2:], environment, namespace, errors=True)


def said(module: Sequence[str], **environment: str) -> str:
    """Runs a module or a program to its end, as `Parent.fork` does, and returns what it said to stdout.

    Raises AssertionError if it does not end well."""
    process = parent().fork(module, {**os.environ, **environment})
    with process.stdin, process.stdout:
        told = process.stdout.read()
    code = process.wait(PATIENCE_SECONDS)
    assert code == 0, f"ended with {code}: {told}"
    return told


def main(descriptor: int) -> None:
    """Forks for whoever has the other end of the socket, and tells of each its id and then its exit code."""
    with spared_imports():
        for name in IMPORTED:
            import_module(name)
        from outrider.worker.parent import die_with
    control = socket.socket(fileno=descriptor)
    woken, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waking)
    while True:
        awaited: list[socket.socket | int] = [control, woken]
        ready, _, _ = select.select(awaited, [], [])
        if woken in ready:
            os.read(woken, LONGEST)
            for pid, code in _ended():
                control.send(json.dumps([pid, code]).encode())
        if control in ready:
            message, given, _, _ = socket.recv_fds(control, LONGEST, 2)
            if not message:
                return
            arranged, arranging = os.pipe()
            here, pid = os.getpid(), os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                control.close()
                os.setsid()
                die_with(here)
                module, environment, namespace, errors = json.loads(message)
                stdin, stdout = given
                others = (woken, waking, arranged, arranging)
                _become(module, environment, namespace, errors, stdin, stdout, others)
            for each in (arranging, *given):
                os.close(each)
            os.read(arranged, 1)  # until it leads its session, so that signals reach it
            os.close(arranged)
            control.send(json.dumps([pid, None]).encode())


def _ended() -> list[tuple[int, int]]:
    found = []
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found.append((ended[0], os.waitstatus_to_exitcode(ended[1])))
    return found


def _become(
    module: Sequence[str],
    environment: Mapping[str, str],
    namespace: str | None,
    errors: bool,
    stdin: int,
    stdout: int,
    others: Sequence[int],
) -> None:
    """Becomes what was asked for, and ends as that does."""
    for source, target in ((stdin, 0), (stdout, 1), (stdout if errors else 2, 2)):
        os.dup2(source, target)
    if namespace is not None:
        with (NAMESPACES / namespace).open() as there:
            assert ctypes.CDLL(None).setns(there.fileno(), CLONE_NEWNET) == 0
    os.environ.clear()
    os.environ.update(environment)
    for each in (stdin, stdout, *others):
        os.close(each)
    if module[0] == "-c":
        sys.argv = ["-c", *module[2:]]
        exec(compile(module[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = list(module)
        runpy.run_module(module[0], run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    main(int(sys.argv[1]))
