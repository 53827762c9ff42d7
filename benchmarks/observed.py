"""What it costs to see what a service does: everything on, against all off, in turn.

    python benchmarks/observed.py --write benchmarks/results/observed.json

Two services of `outrider serve` stand side by side, of which one is asked at a time. One logs a JSON line for
each request, sends traces and metrics by OTLP to a collector (a process of its own that counts), and has its
`/metrics` read every five seconds, and its `/v1/live` followed; the other does nothing of it. A turn of the
first is held against the turns of the other before and after it. Told are these ratios' median, the least and
the largest: of tokens a second, and of tokens a second of a processor (all processes of a service).
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.governor import Served, background, served
from benchmarks.keep import ROOT, Draft, Target, Write, keep
from demo import pair

CONSOLE = Console()
SCRAPE_SECONDS = 5.0
OFF, ON = "off", "on"
COLLECTOR = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
        print(self.path, flush=True)
    def log_message(self, *about): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


class Collector:
    """It takes what is sent, and counts the requests."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        self._said = process.stdout
        self.url = ""
        self.requests = {"/v1/traces": 0, "/v1/metrics": 0}

    async def run(self) -> None:
        while line := (await self._said.readline()).decode().strip():
            self.requests[line] += 1

    async def listening(self) -> None:
        self.url = f"http://127.0.0.1:{int(await self._said.readline())}"


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", COLLECTOR, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        collector = Collector(process)
        await collector.listening()
        async with background(collector.run()):
            yield collector
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _scrape(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        while True:
            (await client.get("/metrics")).raise_for_status()
            await asyncio.sleep(SCRAPE_SECONDS)


async def _follow(url: str) -> None:
    async with (
        httpx.AsyncClient(base_url=url, timeout=None) as client,
        client.stream("GET", "/v1/live") as live,
    ):
        live.raise_for_status()
        async for _ in live.aiter_bytes():
            pass


def processor_seconds(service: Served) -> float:
    """Returns what all processes of a service have used so far."""
    all_of_it = [service.process, *service.process.children(recursive=True)]
    return sum(sum(one.cpu_times()[:2]) for one in all_of_it)


async def turn(service: Served, observed: bool, streams: int, seconds: float) -> tuple[float, float]:
    """Returns the tokens a second, and a second of a processor."""
    watchers = [_scrape(service.client.url), _follow(service.client.url)] if observed else []
    before, began = processor_seconds(service), asyncio.get_running_loop().time()
    tasks = [asyncio.create_task(one) for one in watchers]
    try:
        rate, _ = await service.turn(streams, 0.0, seconds)
        for task in tasks:
            if task.done():
                task.result()  # raises what went wrong with it
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    used, passed = processor_seconds(service) - before, asyncio.get_running_loop().time() - began
    return rate, rate * passed / max(used, 1e-9)


async def measure(target: str, draft: str, streams: int, seconds: float, rounds: int) -> dict[str, Any]:
    models = (target, *(("--draft", draft) if draft else ("--drafters", "0")), "--no-compare")
    rates: dict[str, list[float]] = {OFF: [], ON: []}
    work: dict[str, list[float]] = {OFF: [], ON: []}
    async with collecting() as collector:
        logs = ("--log-level", "info", "--log-format", "json")
        async with served(*models) as off, served(*models, *logs, "--otlp-endpoint", collector.url) as on:
            services = {OFF: off, ON: on}
            for service in services.values():
                await service.turn(streams, 0.0, seconds / 2)  # caches and paces warm up
            for name in [
                *(OFF, ON) * rounds,
                OFF,
            ]:  # none is asked twice in a row
                rate, worked = await turn(services[name], name == ON, streams, seconds)
                rates[name].append(rate)
                work[name].append(worked)
                CONSOLE.print(f"{name:3} {rate:.0f} tokens/s")
        return {
            "streams": streams,
            "seconds": seconds,
            "tokens_per_second": rates,
            "tokens_per_processor_second": work,
            "on_over_off": ratios(rates),
            "on_over_off_by_processor": ratios(work),
            "requests_of_the_collector": collector.requests,
        }


def ratios(of: dict[str, list[float]]) -> dict[str, float]:
    """Returns how each turn with everything on compares with the mean of those before and after it."""
    each = [2 * on / sum(around) for on, around in zip(of[ON], pairwise(of[OFF]), strict=True)]
    return {"median": statistics.median(each), "least": min(each), "largest": max(each)}


def main(
    target: Target = str(pair.TARGET),
    draft: Draft = str(pair.DRAFT),
    streams: Annotated[int, typer.Option(help="At a time.")] = 32,
    seconds: Annotated[float, typer.Option(help="Of a turn.")] = 20.0,
    rounds: Annotated[int, typer.Option(help="Turns with everything on.")] = 10,
    write: Write = None,
) -> None:
    found = asyncio.run(measure(target, draft, streams, seconds, rounds))
    CONSOLE.print_json(data=found)
    keep(write, found)


if __name__ == "__main__":
    typer.run(main)
