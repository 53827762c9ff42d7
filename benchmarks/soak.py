"""Measures if memory stays flat under load that never ends.

    python benchmarks/soak.py --minutes 30 --write benchmarks/results/soak-demo.json

Real processes on one machine, kept full by clients of three kinds: some read as fast as they can and ask
again at once, some read one token a second, and some vanish in the middle of an answer or before it begins.
The resident memory of each process is sampled all the time. Told is its slope over the second half, by least
squares, with a 95 % confidence interval; samples are thinned first, as neighbours are nearly the same sample.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import NormalDist, fmean, linear_regression
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.keep import Draft, Target, Write, keep
from benchmarks.load import ask
from demo.heldout import heldout_prompts
from outrider.options.engine import EngineOptions
from outrider.options.sessions import SessionOptions
from outrider_cli.bench.placing import Cores
from outrider_cli.bench.services import Service, service
from outrider_cli.children import Models, Workers

CONSOLE = Console()
SAMPLE_SECONDS = 1.0
THINNED = 10  # samples that become one, their median
LEAST_POINTS = 5  # for a slope; a short soak is thinned less
SLOW_BUFFER = 4096  # bytes that the kernel keeps for a client that reads slowly
PAUSE_SECONDS = 0.2  # of a client that was refused
KV_MEMORY = "128MiB"  # of each worker
NAMES = {"router": "router", "target": "verifier", "draft": "drafter"}  # of processes
GOAL_SHARE = 0.01  # of a process's memory: most growth in half an hour that counts as flat
MIB = 2**20

Json = dict[str, object]


@dataclass
class Soak:
    """What the clients do, and what was seen of it."""

    service: Service
    prompts: list[str]
    max_tokens: int
    rng: random.Random
    until: float
    ended: Counter[str] = field(default_factory=Counter)

    async def quick(self) -> None:
        """Reads as fast as it can, and asks again."""
        while time.monotonic() < self.until:
            answer = await ask(self.service, self.rng.choice(self.prompts), self.max_tokens)
            self.ended[f"quick {answer.status}"] += 1
            if answer.status != 200:
                await asyncio.sleep(PAUSE_SECONDS)

    async def slow(self) -> None:
        """Reads about one event a second."""
        while time.monotonic() < self.until:
            reader, writer = await self._asked()
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                while time.monotonic() < self.until and await reader.readline():
                    await reader.readline()  # the empty line after an event
                    await asyncio.sleep(1.0)
            writer.close()
            self.ended["slow"] += 1
            await asyncio.sleep(PAUSE_SECONDS)

    async def vanishing(self) -> None:
        """Hangs up after some events, or before the first."""
        while time.monotonic() < self.until:
            reader, writer = await self._asked()
            with suppress(ConnectionError):
                for _ in range(self.rng.choice((0, 0, 8, 40))):
                    if not await reader.readline():
                        break
            writer.transport.abort()
            self.ended["vanished"] += 1
            await asyncio.sleep(self.rng.random() * PAUSE_SECONDS)

    async def _asked(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Returns a connection on which a streamed completion was asked for."""
        place = urlsplit(self.service.url)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (place.hostname, place.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=2 * SLOW_BUFFER)
        prompt = self.rng.choice(self.prompts)
        body = json.dumps(
            {"prompt": prompt, "max_tokens": self.max_tokens, "ignore_eos": True, "stream": True}
        )
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {place.netloc}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body.encode())}\r\n\r\n{body}".encode())
        await writer.drain()
        return reader, writer


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def student(freedom: int) -> float:
    """Returns the 97.5 % point of Student's distribution, by Abramowitz and Stegun's 26.7.5: .2 % too small
    with 5 degrees of freedom, .01 % with 10."""
    z = NormalDist().inv_cdf(0.975)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return (
        z
        + first / freedom
        + second / freedom**2
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384 / freedom**3
    )


def least_seconds() -> float:
    """Returns how long a soak must be for a slope."""
    return 4 * LEAST_POINTS * SAMPLE_SECONDS


def slope(seconds: list[float], values: list[float]) -> Json:
    """Returns the slope over the second half in MiB an hour, and True if that is flat."""
    half = len(seconds) // 2
    width = max(1, min(THINNED, half // LEAST_POINTS))
    thin = [
        (seconds[start + width // 2], sorted(values[start : start + width])[width // 2])
        for start in range(half, len(seconds) - width + 1, width)
    ]
    if len(thin) < LEAST_POINTS:
        raise SystemExit("the soak was too short for a slope: give it more --minutes")
    fit = linear_regression([at for at, _ in thin], [value for _, value in thin])
    center = fmean(at for at, _ in thin)
    residue = sum((value - fit.intercept - fit.slope * at) ** 2 for at, value in thin)
    freedom = len(thin) - 2
    error = math.sqrt(residue / freedom / sum((at - center) ** 2 for at, _ in thin))
    reach = student(freedom) * error
    an_hour = 3600 / MIB
    growth = fit.slope * 1800  # in half an hour
    return {
        "slope_mib_an_hour": round(fit.slope * an_hour, 3),
        "confidence_95_mib_an_hour": [
            round((fit.slope - reach) * an_hour, 3),
            round((fit.slope + reach) * an_hour, 3),
        ],
        "last_mib": round(values[-1] / MIB, 1),
        "most_mib": round(max(values) / MIB, 1),
        "flat": fit.slope - reach <= 0 or growth < GOAL_SHARE * values[-1],
        "points": len(thin),
    }


async def sample(
    meters: Mapping[str, Callable[[], float]], until: float
) -> tuple[list[float], dict[str, list[float]]]:
    """Returns the seconds since the beginning, and what each meter said then."""
    began, seconds = time.monotonic(), []
    memory: dict[str, list[float]] = {name: [] for name in meters}
    while (now := time.monotonic()) < until:
        seconds.append(now - began)
        for name, read in meters.items():
            memory[name].append(read())
        await asyncio.sleep(SAMPLE_SECONDS)
    return seconds, memory


async def churn(
    running: Service,
    seconds: float,
    clients: tuple[int, int, int],
    max_tokens: int,
    seed: int,
    meters: Mapping[str, Callable[[], float]],
) -> Json:
    """Keeps a service full with so many quick, slow and vanishing clients, and returns how what the meters
    read grows, in bytes."""
    quick, slow, vanishing = clients
    until = time.monotonic() + seconds
    soak = Soak(running, heldout_prompts(64), max_tokens, random.Random(seed), until)
    kinds = [soak.quick] * quick + [soak.slow] * slow + [soak.vanishing] * vanishing
    asking = [asyncio.create_task(kind()) for kind in kinds]
    times, memory = await sample(meters, until)
    for task in asking:
        task.cancel()
    failures = [
        repr(done)
        for done in await asyncio.gather(*asking, return_exceptions=True)
        if isinstance(done, Exception)
    ]
    return {
        "answers": dict(soak.ended),
        "clients_failed": failures,
        "processes": {name: slope(times, values) for name, values in memory.items()},
    }


async def run(
    target: str, draft: str | None, minutes: float, clients: tuple[int, int, int], max_tokens: int, seed: int
) -> Json:
    quick, slow, _ = clients
    workers = Workers(verifiers=1, drafters=1, engine=EngineOptions(kv_memory=KV_MEMORY, threads=1))
    sessions = SessionOptions(max_sessions=quick + slow, seed=0)
    async with service(Models(target, draft, "model"), Cores(pinned=False), sessions, workers) as running:
        meters = {NAMES[role]: partial(resident_bytes, pid) for role, pid in running.pids.items()}
        return await churn(running, 60 * minutes, clients, max_tokens, seed, meters)


def main(
    target: Target = "demo/models/target",
    draft: Draft = "demo/models/draft",
    minutes: Annotated[float, typer.Option(min=0.1, help="How long it lasts.")] = 30.0,
    quick: Annotated[int, typer.Option(min=1, help="Clients that read as fast as they can.")] = 24,
    slow: Annotated[int, typer.Option(min=0, help="Clients that read one token a second.")] = 8,
    vanishing: Annotated[int, typer.Option(min=0, help="Clients that hang up.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of each request.")] = 200,
    seed: Annotated[int, typer.Option(help="Of what the clients choose.")] = 1,
    write: Write = None,
) -> None:
    """Keep a service full and watch its memory."""
    clients = (quick, slow, vanishing)
    found = asyncio.run(run(target, draft or None, minutes, clients, max_tokens, seed))
    table = Table("process", "MiB at the end", "slope, MiB/h", "95 % confidence", "flat")
    processes = found["processes"]
    assert isinstance(processes, dict)
    for name, one in processes.items():
        low, high = one["confidence_95_mib_an_hour"]
        shown = (one["last_mib"], one["slope_mib_an_hour"], f"{low} to {high}", one["flat"])
        table.add_row(name, *map(str, shown))
    CONSOLE.print(table)
    CONSOLE.print(f"answers: {found['answers']}; clients that failed: {found['clients_failed'] or 'none'}")
    result: Json = {
        "minutes": minutes,
        "kv_memory": KV_MEMORY,
        "clients": {"quick": quick, "slow": slow, "vanishing": vanishing},
        "max_tokens": max_tokens,
        **found,
    }
    keep(write, result)


if __name__ == "__main__":
    typer.run(main)
