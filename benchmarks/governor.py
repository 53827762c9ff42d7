"""Measures that drafts which do not pay rest: services against plain decoding on the same cores, in turn.

    python benchmarks/governor.py --target demo/grown --write benchmarks/results/governor.json

Services of `outrider serve` stand side by side, of which one is asked at a time: as it is by default, plain
(`--drafters 0`, all cores), and in some cases one that takes drafts always (`--no-compare`). A case runs its
streams at the first for a while, in which it may find out what pays, then at each in turn, several times.
Told is its goodput over plain decoding's in the same round: the rounds' median, the least and the largest.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.keep import ROOT, Draft, Target, Write, keep
from demo import pair
from demo.heldout import heldout_prompts
from outrider_cli.bench.client import Request, ServerClient

CONSOLE = Console()
LEAD_SECONDS = 1.0  # of a turn that do not count, at least: until all streams have begun
PROMPT_LINES = 4
TOKENS = 128  # of an answer
GOAL = 0.97
KV_MEMORY = "1GiB"  # of each worker
PLAIN, GOVERNED, ALWAYS, SHARING, HOSTILE = "plain", "governed", "always", "sharing", "hostile"
PROMPTS = heldout_prompts(256, PROMPT_LINES)
THROTTLED = (0.09, 0.01)  # seconds for which a drafter stands still, and runs


@dataclass
class Served:
    """An `outrider serve`, and what it has sent."""

    client: ServerClient
    process: psutil.Process
    came: list[tuple[float, int]] = field(default_factory=list)  # when, tokens
    begun: set[int] = field(default_factory=set)  # streams of this turn
    asked: int = 0  # requests so far
    logged: int = 0  # requests of which it has written a line of JSON

    def drafter(self) -> psutil.Process:
        return next(child for child in self.process.children(recursive=True) if "drafter" in child.cmdline())

    def cpu_seconds(self) -> float:
        workers = [
            child for child in self.process.children(recursive=True) if "router" not in child.cmdline()
        ]
        return sum(sum(worker.cpu_times()[:2]) for worker in workers)

    async def turn(
        self,
        streams: int,
        temperature: float,
        seconds: float,
        lead: float | None = None,
        used: Callable[[], float] | None = None,
    ) -> tuple[float, float]:
        """Returns the tokens a second, and a second of a processor, of so many streams for a while. `lead`:
        seconds before that; `used`: which processor seconds count; None = those of its workers."""
        used = used or self.cpu_seconds
        tasks = [asyncio.create_task(self._stream(index, temperature)) for index in range(streams)]
        await asyncio.sleep(LEAD_SECONDS if lead is None else lead)
        await self._until(tasks, lambda: len(self.begun) == streams)
        began, busy = time.perf_counter(), used()
        self.came.clear()
        await asyncio.sleep(seconds)
        await self._until(tasks, lambda: bool(self.came))
        ended, busy = time.perf_counter(), used() - busy
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception) and not isinstance(result, asyncio.CancelledError):
                raise result
        tokens = sum(count for when, count in self.came if began <= when < ended)
        self.begun.clear()
        return tokens / (ended - began), tokens / max(busy, 1e-9)

    async def answer(self, streams: int, answers: int, temperature: float) -> int:
        """Returns the tokens of so many answers of each of so many streams, once all are there. These are
        always the same ones."""

        async def stream(index: int) -> int:
            tokens = 0
            for at in range(index, streams * answers, streams):
                self.asked += 1
                ask = Request(PROMPTS[at % len(PROMPTS)], TOKENS, temperature, at)
                tokens += (await self.client.ask(ask)).tokens
            return tokens

        return sum(await asyncio.gather(*(stream(index) for index in range(streams))))

    async def _until(self, tasks: Sequence[asyncio.Task[None]], condition: Callable[[], bool]) -> None:
        """A stream that ends has failed: others wait for it no longer."""
        while not condition() and not any(task.done() for task in tasks):  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def _stream(self, index: int, temperature: float) -> None:
        def came(when: float, count: int | None) -> None:
            self.begun.add(index)
            self.came.append((when, count or 1))

        for at in range(index, len(PROMPTS) * 1000, 64):
            request = Request(PROMPTS[at % len(PROMPTS)], TOKENS, temperature, at)
            self.asked += 1
            await self.client.ask(request, came)


@asynccontextmanager
async def served(target: str, *options: str) -> AsyncIterator[Served]:
    command = [
        sys.executable,
        "-m",
        "outrider_cli",
        "serve",
        "--target",
        target,
        "--port",
        "0",
        "--grpc-port",
        "0",
        "--kv-memory",
        KV_MEMORY,
    ]
    process = await asyncio.create_subprocess_exec(
        *command, *options, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said: list[str] = []
    reading: asyncio.Task[None] | None = None
    try:
        assert process.stdout is not None
        url = ""
        async for line in process.stdout:
            said.append(line.decode(errors="replace"))
            if (found := re.search(r"Outrider is ready: (\S+)", said[-1])) is not None:
                url = found[1]
                break
        else:
            raise SystemExit("".join(said[-20:]))
        extras = {
            "ignore_eos": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        unnamed = ServerClient(url, None, extras)
        client = ServerClient(url, (await unnamed.models())[0], extras)
        await unnamed.close()
        service = Served(client, psutil.Process(process.pid))
        reading = asyncio.create_task(_read_on(process.stdout, service))
        yield service
        await client.close()
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        await process.wait()
        if reading is not None:
            await reading  # to the last line


async def _read_on(stream: asyncio.StreamReader, service: Served) -> None:
    while line := await stream.readline():
        service.logged += b'"message": "request"' in line


Trouble = Callable[[Served], AbstractAsyncContextManager[None]]


@dataclass(frozen=True)
class Case:
    name: str
    streams: int
    temperature: float
    service: str = GOVERNED  # which one is held against plain decoding
    always: bool = False  # whether one that never lets drafts rest is measured, too
    trouble: Trouble | None = None


def throttled(service: Served) -> AbstractAsyncContextManager[None]:
    return background(_throttle(service.drafter()))


def core_taken(_: Served) -> AbstractAsyncContextManager[None]:
    return background(_take_a_core())


CASES = (
    Case("drafts pay", 1, 0.0, always=True),
    Case("both models share all cores", 1, 0.0, SHARING),
    Case("sixteen streams", 16, 0.0, always=True),
    Case("sixteen streams", 16, 0.8),
    Case("sixty-four streams", 64, 0.8),
    Case("a draft that is never right", 4, 0.0, HOSTILE),
    Case("a drafter throttled to a tenth", 4, 0.0, trouble=throttled),
    Case("another program takes a core", 16, 0.0, trouble=core_taken),
    Case("and gives it back", 16, 0.0),
)


@asynccontextmanager
async def background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _throttle(process: psutil.Process) -> None:
    still, running = THROTTLED
    try:
        while True:
            process.suspend()
            await asyncio.sleep(still)
            process.resume()
            await asyncio.sleep(running)
    finally:
        process.resume()


async def _take_a_core() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
    try:
        await process.wait()
    finally:
        process.kill()


def never_right(draft: str, folder: Path) -> str:
    """Returns a folder with that draft, its numbers drawn by lot."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(draft))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(draft).save_pretrained(folder)
    return str(folder)


async def measure(
    target: str, draft: str, seconds: float, settle: float, rounds: int, only: str = ""
) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        options = {
            PLAIN: ("--drafters", "0"),
            GOVERNED: ("--draft", draft),
            ALWAYS: ("--draft", draft, "--no-compare"),
            SHARING: ("--draft", draft, "--threads", str(len(os.sched_getaffinity(0)))),
            HOSTILE: ("--draft", never_right(draft, Path(folder))),
        }
        async with AsyncExitStack() as stack:
            services = {
                name: await stack.enter_async_context(served(target, *options[name]))
                for name in (PLAIN, GOVERNED)
            }
            for case in CASES:
                if not re.search(only, case.name):
                    continue
                async with AsyncExitStack() as further:
                    for name in (case.service, *((ALWAYS,) if case.always else ())):
                        if name not in services:
                            service = await further.enter_async_context(served(target, *options[name]))
                            services = {**services, name: service}
                    row = await run(case, services, seconds, settle, rounds)
                services = {name: services[name] for name in (PLAIN, GOVERNED)}
                rows.append(row)
                CONSOLE.print(f"{row['case']}, T={case.temperature:g}: {row['over_plain']}")
    return rows


async def run(
    case: Case, services: Mapping[str, Served], seconds: float, settle: float, rounds: int
) -> dict[str, Any]:
    ours = services[case.service]
    names = [PLAIN, case.service, *((ALWAYS,) if case.always else ())]
    rates: dict[str, list[float]] = {name: [] for name in names}
    per_cpu: dict[str, list[float]] = {name: [] for name in names}
    async with case.trouble(ours) if case.trouble is not None else nullcontext():
        await ours.turn(case.streams, case.temperature, settle)
        for number in range(rounds):
            for name in names if number % 2 == 0 else names[::-1]:
                rate, of_cpu = await services[name].turn(case.streams, case.temperature, seconds)
                rates[name].append(round(rate, 1))
                per_cpu[name].append(round(of_cpu, 1))
    metrics = services[case.service].client
    return {
        "case": case.name,
        "streams": case.streams,
        "temperature": case.temperature,
        "service": case.service,
        "over_plain": ratios(rates[case.service], rates[PLAIN]),
        "over_always": ratios(rates[case.service], rates[ALWAYS]) if case.always else None,
        "always_over_plain": ratios(rates[ALWAYS], rates[PLAIN]) if case.always else None,
        "over_plain_by_cpu": ratios(per_cpu[case.service], per_cpu[PLAIN]),
        "draft_gain": round(await metrics.gauge("outrider_draft_gain"), 3),
        "drafts_rest": bool(await metrics.gauge("outrider_drafts_rest")),
        "tokens_per_second": rates,
    }


def ratios(ours: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Returns the median of the rounds' ratios, the least and the largest."""
    found = sorted(one / other for one, other in zip(ours, others, strict=True))
    return {
        name: round(value, 3)
        for name, value in zip(
            ("median", "least", "largest"), (statistics.median(found), found[0], found[-1]), strict=True
        )
    }


def main(
    target: Target = str(pair.TARGET),
    draft: Draft = str(pair.DRAFT),
    seconds: Annotated[float, typer.Option(help="Of each turn that counts.")] = 5.0,
    settle: Annotated[float, typer.Option(help="Seconds that a case runs before its turns.")] = 10.0,
    only: Annotated[str, typer.Option(help="Pattern of the names of the cases to measure.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each service.")] = 3,
    write: Write = None,
) -> None:
    """Measure a service with drafts against plain decoding, in the cases where drafts may not pay."""
    began = time.monotonic()
    rows = asyncio.run(measure(target, draft, seconds, settle, rounds, only))
    table = Table("case", "streams", "T", "over plain", "over drafts always", "by processor", "drafts rest")
    for row in rows:
        table.add_row(
            row["case"],
            str(row["streams"]),
            f"{row['temperature']:g}",
            *(told(row[key]) for key in ("over_plain", "over_always", "over_plain_by_cpu")),
            "yes" if row["drafts_rest"] else "no",
        )
    CONSOLE.print(table)
    reached = all(row["over_plain"]["median"] >= GOAL for row in rows)
    CONSOLE.print(f"At least {GOAL} of plain decoding in every case: {'yes' if reached else 'no'}.")
    keep(write, {"target": target, "draft": draft, "seconds": round(time.monotonic() - began), "rows": rows})


def told(ratio: dict[str, float] | None) -> str:
    return "" if ratio is None else f"{ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['largest']:.2f})"


if __name__ == "__main__":
    typer.run(main)
