"""Runs other processes under one parent: starts them, forwards what they print, repairs them, stops them.

It knows nothing of what the children do: a child is a command line that prints one ready line.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

STOP_GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL, beyond what the child is told to drain
DEATHS_FORGIVEN = 3  # within DEATHS_WINDOW_SECONDS, for each child
DEATHS_WINDOW_SECONDS = 60.0
FIRST_BACKOFF_SECONDS = 0.5
LAST_WORDS_SECONDS = 1.0  # how long a dead child's pipe may stay open before it is given up
LONGEST_LINE = 2**16
TAIL_LINES = 20
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One child, as plain data."""

    role: str  # the child's line "outrider ROLE ready: ..." says that it serves
    name: str  # what its lines are prefixed with; unique
    command: tuple[str, ...]
    restart: bool  # whether a death after the ready line is repaired
    drain_seconds: float = 0.0  # that it may go on after SIGTERM with what it has
    last: bool = False  # whether it starts once the others are ready


class Display(Protocol):
    """Where the children's state is shown."""

    def starting(self, name: str) -> None: ...
    def ready(self, name: str) -> None: ...
    def line(self, name: str, text: str) -> None: ...  # a line that a child printed
    def note(self, text: str) -> None: ...  # the supervisor's own word


class ChildDied(Exception):
    """A death that is not repaired; the message is one sentence with the child's reason."""


def restart_delay(deaths: Sequence[float], now: float) -> float | None:
    """Returns the seconds to wait before the next start, doubling with every recent death; None = too many of
    them.

    `deaths` and `now` are seconds of one clock."""
    recent = sum(1 for death in deaths if now - death < DEATHS_WINDOW_SECONDS)
    if recent > DEATHS_FORGIVEN:
        return None
    return float(FIRST_BACKOFF_SECONDS * 2 ** max(recent - 1, 0))


class Supervisor:
    """Owns the children: after stop() none of them is left, whatever happened before.

    Every child leads a session of its own, so that Ctrl-C at the terminal reaches the supervisor alone; and
    on Linux the kernel kills it when the supervisor dies, even by SIGKILL."""

    def __init__(self, display: Display, clock: Callable[[], float] = time.monotonic) -> None:
        self._display = display
        self._clock = clock
        self._children: list[_Child] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._failure: Exception | None = None
        self._failed = asyncio.Event()

    async def start(self, spec: ChildSpec) -> str:
        """Starts a child, waits until it is ready, and returns what follows "ready:" in its ready line.

        Raises ChildDied if it ends before."""
        child = await self._spawn(spec)
        exited: asyncio.Future[Any] = asyncio.create_task(child.exited())
        try:
            await asyncio.wait([child.ready, exited], return_when=asyncio.FIRST_COMPLETED)
        finally:
            exited.cancel()
        if not child.ready.done():
            raise ChildDied(f"{spec.name} ended before it was ready: {child.reason()}")
        self._keepers.append(asyncio.create_task(self._keep(child)))
        return child.ready.result()

    async def start_all(self, specs: Sequence[ChildSpec]) -> None:
        """Starts children side by side, and those that come last after them, and waits until all are ready.
        Raises ChildDied if one ends."""
        for last in (False, True):
            starts = [asyncio.create_task(self.start(spec)) for spec in specs if spec.last is last]
            try:
                await asyncio.gather(*starts)
            finally:
                for start in starts:
                    start.cancel()
                await asyncio.gather(*starts, return_exceptions=True)

    def pid(self, name: str) -> int:
        """Returns the process id of the child of that name, of its latest run. Raises KeyError if none was
        started."""
        return {child.spec.name: child.pid for child in self._children}[name]

    async def failed(self) -> None:
        """Waits for a death that cannot be repaired, and raises it as ChildDied."""
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    async def stop(self) -> None:
        """Sends SIGTERM to every child, SIGKILL to those left after drain time and grace. Returns when all
        are gone."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(child.end() for child in self._children))
        self._children = []

    def kill(self) -> None:
        """Sends SIGKILL to every child: whoever waits in `stop` waits no longer."""
        for child in self._children:
            child.send(signal.SIGKILL)

    async def _keep(self, child: _Child) -> None:
        """Repairs one child as often as is forgiven."""
        deaths: list[float] = []
        try:
            while True:
                await child.exited()
                spec = child.spec
                if not spec.restart:
                    raise ChildDied(f"{spec.name} died: {child.reason()}")
                deaths.append(self._clock())
                delay = restart_delay(deaths, deaths[-1])
                if delay is None:
                    raise ChildDied(
                        f"{spec.name} died more than {DEATHS_FORGIVEN} times in {DEATHS_WINDOW_SECONDS:g} s: "
                        f"{child.reason()}"
                    )
                self._display.note(f"{spec.name} died ({child.reason()}); restarting it in {delay:g} s")
                await asyncio.sleep(delay)
                child = await self._spawn(spec)
        except Exception as error:
            self._failure = self._failure or error
            self._failed.set()

    async def _spawn(self, spec: ChildSpec) -> _Child:
        self._display.starting(spec.name)
        process = await asyncio.create_subprocess_exec(
            *spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
            preexec_fn=_dies_with_parent(),
        )
        child = _Child(spec, process, self._display)
        self._children = [c for c in self._children if c.alive] + [child]
        return child


class _Child:
    """One run of a child process."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process, display: Display) -> None:
        self.spec = spec
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._process = process
        self._display = display
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._forwarding = asyncio.create_task(self._forward())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def exited(self) -> None:
        """Waits for the process's end and for its last words."""
        await self._process.wait()
        await asyncio.wait({self._forwarding}, timeout=LAST_WORDS_SECONDS)

    async def end(self) -> None:
        """Sends SIGTERM, then SIGKILL after its drain time and the grace."""
        patience = self.spec.drain_seconds + STOP_GRACE_SECONDS
        for sign, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, None)):
            if not self.alive:
                break
            self.send(sign)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._process.wait()
        await self.exited()
        self._forwarding.cancel()

    def send(self, sign: signal.Signals) -> None:
        """Sends a signal to the whole process group."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, sign)

    def reason(self) -> str:
        """Returns why it ended, in its own words if it had some: its error line, otherwise its last line."""
        code = self._process.returncode
        if code is not None and code < 0:
            return f"killed by signal {-code} ({signal.strsignal(-code)})"
        if code == 0:
            return "exit code 0: it was told to stop"
        errors = [line for line in self._tail if line.startswith(f"outrider {self.spec.role}: ")]
        words = errors[-1:] or [line for line in self._tail if line.strip()][-1:]
        return f"exit code {code}: {words[0].strip()}" if words else f"exit code {code}"

    async def _forward(self) -> None:
        stream = self._process.stdout
        assert stream is not None  # asked for at the start
        announcement = f"outrider {self.spec.role} ready: "
        async for text in _lines(stream):
            self._tail.append(text)
            self._display.line(self.spec.name, text)
            if text.startswith(announcement) and not self.ready.done():
                self.ready.set_result(text.removeprefix(announcement))
                self._display.ready(self.spec.name)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yields lines as they come; of one redrawn with carriage returns (a progress bar), its last state."""
    pending = b""
    while chunk := await stream.read(LONGEST_LINE):
        *lines, pending = (pending + chunk).split(b"\n")
        if len(pending) > LONGEST_LINE:
            lines, pending = [*lines, pending], b""
        for line in lines:
            yield _text(line)
    if pending:
        yield _text(pending)


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip().rpartition("\r")[2]


def _dies_with_parent() -> Callable[[], None] | None:
    """Returns what a child runs before its command, so that the kernel kills it when this process dies
    (Linux)."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: after a fork only calls that take no lock are safe
    parent = os.getpid()

    def arrange() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the arrangement stood
            os._exit(1)

    return arrange
