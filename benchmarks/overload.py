"""What becomes of requests at four times the load that the service carries.

    python benchmarks/overload.py --write benchmarks/results/overload-demo.json

Real processes on one machine: the models on the first half of its cores, router and client on the others,
so that neither waits for a core that a model has. First the capacity: with ever more clients that ask in
a closed loop, the least number of them at which the service is nearly as fast as at its best. Then a
router that takes so many requests at a time. At capacity: that many clients in a closed loop. Overload:
requests that come by themselves, at random times, at four times the rate at which they were finished at
capacity. Those that are let in should keep their latency, and the others should hear at once that they
are not. How late the client's own event loop is, which every time told here has a part of, shows in how
late it asks.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.keep import Draft, Target, Write, keep
from benchmarks.load import OK, REFUSED, Answer, ask, closed_loop
from demo.heldout import heldout_prompts
from outrider.options.engine import EngineOptions
from outrider.options.sessions import SessionOptions
from outrider.worker.garbage import spare_what_is_there
from outrider_cli.bench.figures import percentile
from outrider_cli.bench.placing import Cores, stay_on
from outrider_cli.bench.services import Service, service
from outrider_cli.children import Models, Workers

CONSOLE = Console()
CLIENTS = (1, 2, 4, 8, 16, 32, 64)
NEARLY = 0.9  # of the best rate
UNLIMITED = 4096
KV_MEMORY = "256MiB"  # of each worker; so many sessions take less

Json = dict[str, object]


def served(target: str, draft: str | None, most: int, cores: Cores) -> AbstractAsyncContextManager[Service]:
    """Starts a service that takes so many requests at a time."""
    workers = Workers(verifiers=1, drafters=1, engine=EngineOptions(kv_memory=KV_MEMORY, threads=1))
    return service(Models(target, draft, "model"), cores, SessionOptions(max_sessions=most, seed=0), workers)


async def capacity(
    target: str, draft: str | None, prompts: list[str], max_tokens: int, seconds: float, cores: Cores
) -> tuple[int, dict[int, float]]:
    """Returns the most clients that are worth having, and tokens a second by number of clients."""
    rates: dict[int, float] = {}
    async with served(target, draft, UNLIMITED, cores) as service:
        await closed_loop(service, prompts, max_tokens, 4, seconds)  # caches and paces warm up
        for clients in CLIENTS:
            began = time.perf_counter()
            answers = await closed_loop(service, prompts, max_tokens, clients, seconds)
            rates[clients] = sum(one.tokens for one in answers) / (time.perf_counter() - began)
            CONSOLE.print(f"{clients:3} clients: {rates[clients]:.0f} tokens/s")
            if rates[clients] < NEARLY * max(rates.values()):
                break
    best = max(rates.values())
    return next(clients for clients in rates if rates[clients] >= NEARLY * best), rates


async def open_loop(
    service: Service, prompts: list[str], max_tokens: int, rate: float, seconds: float, seed: int
) -> tuple[list[Answer], list[float]]:
    """Sends requests that come at random, `rate` a second, whatever became of those before; and by how many
    seconds each was asked too late."""
    rng = random.Random(seed)
    began, at = time.perf_counter(), 0.0
    asked: list[asyncio.Task[Answer]] = []
    late: list[float] = []
    while (at := at + rng.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        late.append(max(0.0, time.perf_counter() - began - at))
        prompt = prompts[len(asked) % len(prompts)]
        asked.append(asyncio.create_task(ask(service, prompt, max_tokens)))
    return await asyncio.gather(*asked), late


def seconds_of(values: list[float]) -> Json:
    if not values:
        return {"count": 0}
    return {
        "count": len(values),
        "p50": round(percentile(values, 50), 4),
        "p95": round(percentile(values, 95), 4),
        "max": round(max(values), 4),
    }


def told(answers: list[Answer]) -> Json:
    accepted = [one for one in answers if one.status == OK]
    refused = [one for one in answers if one.status == REFUSED]
    return {
        "requests": len(answers),
        "accepted": len(accepted),
        "refused": len(refused),
        "failed": len(answers) - len(accepted) - len(refused),
        "latency_seconds": seconds_of([one.seconds for one in accepted]),
        "first_token_seconds": seconds_of([one.first_token for one in accepted if one.first_token]),
        "refusal_seconds": seconds_of([one.seconds for one in refused]),
        "retry_after": sorted({one.retry_after or "" for one in refused}),
    }


async def measure(
    target: str, draft: str | None, max_tokens: int, seconds: float, factor: float, seed: int
) -> Json:
    prompts = heldout_prompts(64)
    spare_what_is_there()  # a full round would make every answer of that moment late
    halves = Cores.divided(sorted(os.sched_getaffinity(0)))
    cores = Cores(halves.target, halves.target, router=halves.draft)
    stay_on(halves.draft)
    most, rates = await capacity(target, draft, prompts, max_tokens, seconds / 4, cores)
    async with served(target, draft, most, cores) as service:
        await closed_loop(service, prompts, max_tokens, most, seconds / 4)
        began = time.perf_counter()
        at_capacity = await closed_loop(service, prompts, max_tokens, most, seconds)
        rate = sum(one.status == OK for one in at_capacity) / (time.perf_counter() - began)
        overload, late = await open_loop(service, prompts, max_tokens, factor * rate, seconds, seed)
    before, after = told(at_capacity), told(overload)
    ratio = {
        part: after["latency_seconds"][part] / before["latency_seconds"][part]  # type: ignore[index]
        for part in ("p50", "p95")
    }
    return {
        "capacity_sessions": most,
        "tokens_per_second_by_clients": rates,
        "finished_per_second_at_capacity": rate,
        "offered_per_second": factor * rate,
        "at_capacity": before,
        "overload": after,
        "client_late_seconds": seconds_of(late),
        "latency_ratio": ratio,
    }


def main(
    target: Target = "demo/models/target",
    draft: Draft = "demo/models/draft",
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of each request.")] = 64,
    seconds: Annotated[float, typer.Option(min=1, help="At capacity, and again in overload.")] = 60.0,
    factor: Annotated[float, typer.Option(min=1, help="The overload, over what is finished.")] = 4.0,
    seed: Annotated[int, typer.Option(help="Of the times at which requests come.")] = 1,
    write: Write = None,
) -> None:
    """Measure latency and refusals at several times the load that the service carries."""
    found = asyncio.run(measure(target, draft or None, max_tokens, seconds, factor, seed))
    columns = ("requests", "let in", "refused", "latency", "first token", "refusal")
    table = Table("load; p50/p95", *columns)
    for name in ("at_capacity", "overload"):
        one: dict[str, object] = found[name]  # type: ignore[assignment]
        table.add_row(
            name,
            *(str(one[count]) for count in ("requests", "accepted", "refused")),
            *(_shown(one[part]) for part in ("latency_seconds", "first_token_seconds", "refusal_seconds")),
        )
    CONSOLE.print(table)
    CONSOLE.print(f"capacity {found['capacity_sessions']} sessions; times as long: {found['latency_ratio']}")
    CONSOLE.print(f"the client's own event loop was late by {_shown(found['client_late_seconds'])}")
    keep(write, {"max_tokens": max_tokens, "seconds": seconds, "factor": factor, **found})


def _shown(spread: object) -> str:
    assert isinstance(spread, dict)
    return f"{spread['p50'] * 1e3:.0f}/{spread['p95'] * 1e3:.0f} ms" if spread["count"] else "-"


if __name__ == "__main__":
    typer.run(main)
