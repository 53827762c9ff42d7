"""What it costs to see what a service does: everything on, against all off, in turn.

    python -m benchmarks.observed --write benchmarks/results/observed.json
    python -m benchmarks.observed --target TARGET --draft '' --serve '--propose suffix --quantization int8'

In each round two services of `outrider serve` are started, of which one is asked at a time. One logs a JSON
line for each request, sends the trace of each, and metrics, by OTLP to a collector (a process of its own that
keeps what comes), and has its `/metrics` read every five seconds, and its `/v1/live` followed; the other does
nothing of it. A turn is the same answers for both, from the first question to the last token; what is left
to be sent of it is waited for, and counts as its processor time. A turn of the first is held against the
turns of the other before and after it. Told are these ratios' median, the least and the largest: of tokens a
second, and of tokens a second of a processor (all processes of a service).

Services that are started alike differ by some percent: hence several of them.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.governor import Served, served
from benchmarks.keep import ROOT, Draft, Target, Write, keep
from demo import pair

CONSOLE = Console()
SCRAPE_SECONDS = 5.0
EXPORT_SECONDS = 5.0  # at least as often spans are sent; OTEL_BSP_SCHEDULE_DELAY
OFF, ON = "off", "on"
COLLECTOR = """
import http.server, json
came = {"/v1/traces": [], "/v1/metrics": []}
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        came[self.path].append(self.rfile.read(int(self.headers["content-length"])))
        self.answer(b"")
    def do_GET(self):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
        spans = [
            span.trace_id
            for each in map(ExportTraceServiceRequest.FromString, came["/v1/traces"])
            for resource in each.resource_spans for scope in resource.scope_spans for span in scope.spans
        ]
        told = {"requests": {path: len(bodies) for path, bodies in came.items()}}
        self.answer(json.dumps(told | {"spans": len(spans), "traces": len(set(spans))}).encode())
    def answer(self, body):
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *about): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


@asynccontextmanager
async def collecting() -> AsyncIterator[str]:
    """Yields the address of a collector that takes what is sent. Asked for it, it tells what came."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", COLLECTOR, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _scrape(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        while True:
            await asyncio.sleep(SCRAPE_SECONDS)
            (await client.get("/metrics")).raise_for_status()


async def _follow(url: str) -> None:
    async with (
        httpx.AsyncClient(base_url=url, timeout=None) as client,
        client.stream("GET", "/v1/live") as live,
    ):
        live.raise_for_status()
        async for _ in live.aiter_bytes():
            pass


def processor_seconds(serve: psutil.Process) -> float:
    """Returns what all processes of a service have used so far."""
    return sum(sum(one.cpu_times()[:2]) for one in (serve, *serve.children(recursive=True)))


@dataclass
class Turns:
    """What those of a round's two services gave, in the order in which they were asked."""

    rates: dict[str, list[float]] = field(default_factory=lambda: {OFF: [], ON: []})  # tokens a second
    work: dict[str, list[float]] = field(default_factory=lambda: {OFF: [], ON: []})  # of a processor

    async def run(self, service: Served, name: str, streams: int, answers: int) -> None:
        watchers = [_scrape(service.client.url), _follow(service.client.url)] if name == ON else []
        tasks = [asyncio.create_task(one) for one in watchers]
        try:
            began, busy = time.perf_counter(), processor_seconds(service.process)
            tokens = await service.answer(streams, answers, 0.0)
            rate = tokens / (time.perf_counter() - began)
            await asyncio.sleep(EXPORT_SECONDS)
            worked = tokens / (processor_seconds(service.process) - busy)
            for task in tasks:
                if task.done():
                    task.result()  # raises what went wrong with it
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self.rates[name].append(rate)
        self.work[name].append(worked)
        CONSOLE.print(f"{name:3} {rate:.0f} tokens/s, {worked:.0f} a second of a processor")


async def measure(
    target: str, guesses: Sequence[str], streams: int, answers: int, turns: int, rounds: int
) -> dict[str, Any]:
    models = (target, *guesses, "--no-compare")
    found = [Turns() for _ in range(rounds)]
    asked = logged = 0
    async with collecting() as collector:
        logs = ("--log-level", "info", "--log-format", "json")
        for number, each in enumerate(found):
            options = {OFF: models, ON: (*models, *logs, "--otlp-endpoint", collector)}
            first, second = (OFF, ON) if number % 2 == 0 else (ON, OFF)
            async with served(*options[first]) as one, served(*options[second]) as other:
                services = {first: one, second: other}
                for service in services.values():
                    await service.answer(streams, max(answers // 2, 1), 0.0)  # caches and paces warm up
                for name in [*(OFF, ON) * turns, OFF]:  # none is asked twice in a row
                    await each.run(services[name], name, streams, answers)
            asked, logged = asked + services[ON].asked, logged + services[ON].logged
        async with httpx.AsyncClient() as client:
            came = json.loads((await client.get(collector)).text)
    return {
        "streams": streams,
        "answers": answers,
        "tokens_per_second": [each.rates for each in found],
        "tokens_per_processor_second": [each.work for each in found],
        "on_over_off": ratios([each.rates for each in found]),
        "on_over_off_by_processor": ratios([each.work for each in found]),
        "requests": asked,
        "log_lines": logged,
        "collector": came,
    }


def ratios(rounds: list[dict[str, list[float]]]) -> dict[str, float]:
    """Returns how turns with everything on compare with the mean of those before and after each."""
    each = [
        2 * on / sum(around) for of in rounds for on, around in zip(of[ON], pairwise(of[OFF]), strict=True)
    ]
    return {"median": statistics.median(each), "least": min(each), "largest": max(each)}


def main(
    target: Target = str(pair.TARGET),
    draft: Draft = str(pair.DRAFT),
    serve: Annotated[str, typer.Option(help="More options of outrider serve, for both.")] = "",
    streams: Annotated[int, typer.Option(help="At a time.")] = 32,
    answers: Annotated[int, typer.Option(help="Of each stream in a turn.")] = 6,
    turns: Annotated[int, typer.Option(help="With everything on, of each pair of services.")] = 3,
    rounds: Annotated[int, typer.Option(help="Pairs of services.")] = 6,
    write: Write = None,
) -> None:
    guesses = [*(("--draft", draft) if draft else ()), *shlex.split(serve)]
    found = asyncio.run(measure(target, guesses, streams, answers, turns, rounds))
    CONSOLE.print_json(data=found)
    keep(write, found)


if __name__ == "__main__":
    typer.run(main)
