"""A group of requests that are sent together, and the time in which all of them are being answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from outrider.bench.client import Reply, Request, Watch

Seconds = Mapping[str, float]  # of CPU, by what used it


class Server(Protocol):
    """What can be asked."""

    async def ask(self, request: Request, watch: Watch | None = None) -> Reply: ...


class Window:
    """From the last stream's first token to the first stream's end, with the CPU seconds used meanwhile.

    Before it some streams wait for others' prompts, after it fewer run than are measured."""

    def __init__(self, streams: int, cpu: Callable[[], Seconds]) -> None:
        self._waiting = streams
        self._cpu = cpu
        self._over = False
        self._at_start: Seconds | None = None
        self.cpu_seconds: Seconds | None = None  # None = there was no moment at which all streams ran

    def began(self) -> None:
        self._waiting -= 1
        if self._waiting == 0:
            self._at_start = self._cpu()

    def ended(self) -> None:
        if not self._over and self._at_start is not None:
            before, now = self._at_start, self._cpu()
            self.cpu_seconds = {name: now[name] - before[name] for name in now if name in before}
        self._over = True


async def ask_together(
    server: Server, requests: Sequence[Request], cpu: Callable[[], Seconds]
) -> tuple[list[Reply], Seconds | None]:
    """All answers, in the order of the requests, and the CPU seconds of their window.

    The first error of any is raised, once the others are cancelled."""
    window = Window(len(requests), cpu)
    tasks = [asyncio.create_task(server.ask(request, window)) for request in requests]
    try:
        return await asyncio.gather(*tasks), window.cpu_seconds
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def cpu_clock(pid: int) -> float:
    """CPU seconds that all threads of a process have used so far (Linux). Raises OSError where it is gone."""
    return time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid of glibc computes the clock's number
