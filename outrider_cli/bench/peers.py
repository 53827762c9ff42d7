"""The process of transformers' generate (peer.py), asked like a server; and its best setting, found."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

from outrider.errors import StartupError
from outrider_cli.bench.client import Came, Reply, Request
from outrider_cli.bench.figures import measured
from outrider_cli.bench.group import Answers, Seconds
from outrider_cli.bench.placing import Cores
from outrider_cli.children import Models

CANDIDATES = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # constant numbers of draft tokens that are tried
LONGEST_LINE = 2**24


class Peer:
    """The process. One request at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, request: Request, assistant: str | int | None) -> Reply:
        assert self._process.stdin is not None
        sent = time.perf_counter()
        self._process.stdin.write((json.dumps({**asdict(request), "assistant": assistant}) + "\n").encode())
        told = json.loads(await self.line())
        arrivals = [(at, tokens) for at, tokens in told.pop("arrivals")]
        return Reply(sent=sent, arrivals=arrivals, **told)

    async def line(self) -> bytes:
        """Returns what it says next. Raises StartupError if it has ended."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise StartupError(
                "the process of transformers ended; its last words are above. --no-peers leaves it out"
            )
        return line


@dataclass(frozen=True, slots=True)
class Generate:
    """One way of asking the process, as a server is asked."""

    peer: Peer
    assistant: str | int | None  # None = plain, DEFAULT, or the number of tokens to draft at a time

    async def ask(self, request: Request, came: Came | None = None) -> Reply:
        return await self.peer.ask(request, self.assistant)

    def cpu(self) -> Seconds:
        return {}  # told with the reply


@asynccontextmanager
async def peer(models: Models, cores: Cores) -> AsyncIterator[Peer]:
    """Starts the process, on all of the cores. Raises StartupError if it cannot load the pair."""
    threads = str(len(cores.all))
    arguments = (str(os.getpid()), threads, models.target, models.draft or "")
    command = (*cores.prefix(cores.all), sys.executable, "-m", "outrider_cli.bench.peer", *arguments)
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LONGEST_LINE,
        env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
    )
    try:
        running = Peer(process)
        await running.line()
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def best_setting(running: Peer, requests: Sequence[Request]) -> int:
    """Returns the constant number of draft tokens with which the requests are answered fastest, by median."""
    rates: dict[int, list[float]] = {k: [] for k in CANDIDATES}
    for request in requests:
        for k in CANDIDATES:
            found = measured(Answers([await running.ask(request, k)]))
            rates[k].append(found.rate)
    return max(CANDIDATES, key=lambda k: statistics.median(rates[k]))
