"""A group of requests that are sent together, and the time in which as many of them are being answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Protocol

from outrider_cli.bench.client import Came, Reply, Request

Seconds = Mapping[str, float]  # of CPU, by what used it


class Server(Protocol):
    """What can be asked."""

    async def ask(self, request: Request, came: Came | None = None) -> Reply: ...


@dataclass(slots=True)
class Answers:
    """What a group was told. Its time: from the last stream's first token to the end of the last answer."""

    replies: list[Reply]  # in the order of the requests
    further: list[tuple[float, int | None]] = field(default_factory=list)
    # (when, tokens) of what was asked after them; None = the server does not tell
    cpu_seconds: Seconds = field(default_factory=dict)  # used in that time


async def ask_together(server: Server, requests: Sequence[Request], cpu: Callable[[], Seconds]) -> Answers:
    """Asks all at once. A stream whose answer is complete asks on, the same requests in their order, until
    all answers are: so as many run to the end, however much faster some are answered than others.

    The first error of any is raised, once the others are cancelled."""
    replies: dict[int, Reply] = {}
    begun: set[int] = set()
    found = Answers([])
    at_start: dict[str, float] = {}
    following = cycle(requests)

    async def stream(number: int) -> None:
        def came(at: float, tokens: int | None) -> None:
            if number not in begun:
                begun.add(number)
                if len(begun) == len(requests):
                    at_start.update(cpu())

        replies[number] = await server.ask(requests[number], came)
        if len(replies) == len(requests):
            now = cpu()
            found.cpu_seconds = {name: now[name] - at_start[name] for name in now if name in at_start}
        while len(replies) < len(requests):
            await server.ask(next(following), lambda at, tokens: found.further.append((at, tokens)))

    streams = [asyncio.create_task(stream(number)) for number in range(len(requests))]
    try:
        # The first stream to end is the one with the last answer, or has failed.
        done, _ = await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            one.result()
    finally:
        for one in streams:
            one.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    found.replies = [replies[number] for number in range(len(requests))]
    return found


def cpu_clock(pid: int) -> float:
    """Returns the CPU seconds that all threads of a process have used so far (Linux). Raises OSError if it is
    gone."""
    return time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid of glibc computes the clock's number
