"""Our services as processes of their own, and a client that notes what became of each request."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import httpx

from outrider.bench.services import Quiet
from outrider.cli.plan import Models, Workers, router_child, worker_children
from outrider.cli.serve import reachable, router_addresses
from outrider.supervisor import Supervisor

OK, REFUSED = 200, 429


@dataclass(frozen=True, slots=True)
class Serving:
    url: str
    pids: dict[str, int]  # by role


@asynccontextmanager
async def serving(
    target: str, draft: str | None, max_sessions: int, kv_memory: str = "1GiB"
) -> AsyncIterator[Serving]:
    """A router that takes `max_sessions` at a time, a verifier, and a drafter where `draft` names a model.
    Raises ChildDied with what a process said where it ends too early."""
    supervisor = Supervisor(Quiet())
    models = Models(target, draft, "model")
    workers = Workers(verifiers=1, drafters=1, device="cpu", dtype=None, kv_memory=kv_memory, threads=1)
    router = router_child("127.0.0.1", 0, 0, num_speculative_tokens=8, seed=0)
    router = replace(router, command=(*router.command, "--max-sessions", str(max_sessions)))
    try:
        url, grpc_address, *_ = (
            reachable(address) for address in router_addresses(await supervisor.start(router))
        )
        children = worker_children(models, workers, grpc_address)
        for child in children:  # one after the other: each measures at its start how fast it is
            await supervisor.start(child)
        yield Serving(url, {child.name: supervisor.pid(child.name) for child in (router, *children)})
    finally:
        await supervisor.stop()


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds are counted from the request on."""

    status: int
    began: float
    seconds: float  # to its end, or to the refusal
    first_token: float | None = None
    tokens: int = 0
    retry_after: str | None = None


async def ask(client: httpx.AsyncClient, prompt: str, max_tokens: int) -> Answer:
    """A streamed completion, read as fast as it comes."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    first, tokens = None, 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != OK:
            await response.aread()
            later = response.headers.get("retry-after")
            seconds = time.perf_counter() - began
            return Answer(response.status_code, began, seconds, retry_after=later)
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            first = first if first is not None else time.perf_counter() - began
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                status = int(event["error"].get("code") or 500)
                return Answer(status, began, time.perf_counter() - began, first, tokens)
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
    return Answer(OK, began, time.perf_counter() - began, first, tokens)


def http_client(url: str) -> httpx.AsyncClient:
    """As many connections as are asked for, and no timeouts of its own."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False)


async def closed_loop(
    client: httpx.AsyncClient, prompts: list[str], max_tokens: int, concurrency: int, seconds: float
) -> list[Answer]:
    """So many clients, each of which asks again as soon as it has its answer; all that began in time."""
    answers: list[Answer] = []
    until = time.perf_counter() + seconds
    order = iter(range(10**9))

    async def one() -> None:
        while time.perf_counter() < until:
            answers.append(await ask(client, prompts[next(order) % len(prompts)], max_tokens))

    await asyncio.gather(*(one() for _ in range(concurrency)))
    return answers
