"""Our services as processes of their own, and a client that notes what became of each request."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from outrider.options.engine import EngineOptions
from outrider.options.sessions import SessionOptions
from outrider_cli.bench.placing import Cores
from outrider_cli.bench.services import Quiet
from outrider_cli.children import Models, Workers, router_child, worker_children
from outrider_cli.serve import reachable, router_addresses
from outrider_cli.supervisor import Supervisor
from router.config import RouterConfig

OK, REFUSED = 200, 429

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class Serving:
    url: str
    pids: dict[str, int]  # by role


@asynccontextmanager
async def serving(
    target: str,
    draft: str | None,
    max_sessions: int,
    kv_memory: str = "1GiB",
    cores: Cores | None = None,
) -> AsyncIterator[Serving]:
    """A router that takes `max_sessions` at a time, a verifier, and a drafter where `draft` names a model;
    with `cores`, both models on the target's and the router on the others. Raises ChildDied with what a
    process said where it ends too early."""
    supervisor = Supervisor(Quiet())
    models = Models(target, draft, "model")
    workers = Workers(1, 1, EngineOptions(kv_memory=kv_memory, threads=1))
    sessions = SessionOptions(max_sessions=max_sessions, seed=0)
    router = router_child(RouterConfig(port=0, grpc_port=0, sessions=sessions), workers.logging)
    router_stays = cores.prefix(cores.draft) if cores is not None else ()
    router = replace(router, command=(*router_stays, *router.command))
    try:
        url, grpc_address, *_ = (
            reachable(address) for address in router_addresses(await supervisor.start(router))
        )
        children = worker_children(models, workers, grpc_address)
        if cores is not None:
            models_stay = cores.prefix(cores.target)
            children = [replace(child, command=(*models_stay, *child.command)) for child in children]
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


@dataclass
class Client:
    """Asks over HTTP by hand, with a connection for each request; those of refused ones are used again.

    Much of what httpx told of a refusal was its own time and waiting for one another in its pool. In one run
    beside a service and other work on two cores, p95 was 45 ms by httpx, 34 by this client, in turn with it,
    and 20 to 24 by one that did nothing else, in a process of its own."""

    url: str
    idle: list[Connection] = field(default_factory=list)

    async def ask(self, prompt: str, max_tokens: int) -> Answer:
        """A streamed completion, read as fast as it comes."""
        request = self._request(prompt, max_tokens)
        began = time.perf_counter()
        reader, writer = await self._connection()
        writer.write(request)
        status_line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
        status = int(status_line.split()[1])
        if status != OK:
            headers = {
                name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
            }
            await reader.readexactly(int(headers["content-length"]))
            self.idle.append((reader, writer))
            seconds = time.perf_counter() - began
            return Answer(status, began, seconds, retry_after=headers.get("retry-after"))
        first, tokens = None, 0
        try:
            async for line in reader:  # an event is in one chunk
                if line == b"data: [DONE]\n":
                    break
                if not line.startswith(b"data: {"):
                    continue
                first = first if first is not None else time.perf_counter() - began
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    status = int(event["error"].get("code") or 500)
                elif event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
            else:
                raise ConnectionError("the stream ended without its end")
        finally:
            writer.close()
        return Answer(status, began, time.perf_counter() - began, first, tokens)

    async def _connection(self) -> Connection:
        while self.idle:
            reader, writer = self.idle.pop()
            if not reader.at_eof():  # the service closes what has been idle for long
                return reader, writer
            writer.close()
        place = urlsplit(self.url)
        return await asyncio.open_connection(place.hostname, place.port)

    def _request(self, prompt: str, max_tokens: int) -> bytes:
        asked = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body = json.dumps(asked).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {urlsplit(self.url).netloc}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


async def closed_loop(
    client: Client, prompts: list[str], max_tokens: int, concurrency: int, seconds: float
) -> list[Answer]:
    """So many clients, each of which asks again as soon as it has its answer; all that began in time."""
    answers: list[Answer] = []
    until = time.perf_counter() + seconds
    order = iter(range(10**9))

    async def one() -> None:
        while time.perf_counter() < until:
            answers.append(await client.ask(prompts[next(order) % len(prompts)], max_tokens))

    await asyncio.gather(*(one() for _ in range(concurrency)))
    return answers
