"""Runs a benchmark: everything is started, measured, and ended."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from outrider.errors import InvalidRequest
from outrider.options.sessions import SessionOptions
from outrider_cli.bench.cells import (
    ASSISTED,
    CHAINS,
    LOCK_STEP,
    OURS,
    PATHS,
    PLAIN,
    PLAIN_ALL,
    SERVER,
    STREAMING,
    TRANSFORMERS,
)
from outrider_cli.bench.client import Came, Reply, Request, ServerClient
from outrider_cli.bench.group import Seconds
from outrider_cli.bench.measuring import Bench, Progress, Result, Server
from outrider_cli.bench.peer import DEFAULT
from outrider_cli.bench.peers import Generate, peer
from outrider_cli.bench.placing import stay_on
from outrider_cli.bench.relay import Relay
from outrider_cli.bench.services import EXTRAS, Service, service
from outrider_cli.bench.settings import Settings
from outrider_cli.children import Workers


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A server that was there before; nothing of its processes is known."""

    client: ServerClient

    async def ask(self, request: Request, came: Came | None = None) -> Reply:
        return await self.client.ask(request, came)

    def cpu(self) -> Seconds:
        return {}


async def run(settings: Settings, progress: Progress) -> Result:
    """Returns what the run found. Raises StartupError if something does not start, otherwise what a server
    says is wrong."""
    async with AsyncExitStack() as stack:
        services: Mapping[str, Service] = {}
        if settings.url is not None:
            client = await reach(settings.url, settings.model)
            stack.push_async_callback(client.close)
            bench = Bench(settings, {SERVER: Elsewhere(client)}, None, progress)
        else:
            bench, services = await _start(settings, stack, progress)
        await bench.read([way for way in settings.ways if way in (*OURS, SERVER)])
        await bench.measure()
        if STREAMING in services:
            bench.result.rejections = await services[STREAMING].rejections()
        return bench.result


async def _start(
    settings: Settings, stack: AsyncExitStack, progress: Progress
) -> tuple[Bench, Mapping[str, Service]]:
    """Starts our services and transformers, one after the other. What is started ends with the stack."""
    assert settings.models is not None
    if settings.cores.pinned:
        stay_on(settings.cores.draft)
    ours = [way for way in settings.ways if way in OURS]
    progress.stage("Starting", len(ours) + settings.peers)
    relay = None
    if any(settings.rtts_ms):
        relay = Relay()
        await relay.start()
        stack.push_async_callback(relay.close)
    services: dict[str, Service] = {}
    alone = settings.models.alone
    for way in ours:
        progress.step(way)
        services[way] = await stack.enter_async_context(
            service(
                alone if way in (PLAIN, PLAIN_ALL) else settings.models,
                replace(settings.cores, target=settings.cores.all) if way == PLAIN_ALL else settings.cores,
                SessionOptions(seed=0),
                Workers(
                    1,
                    1,
                    settings.engine,
                    lock_step=way == LOCK_STEP,
                    branches=way != CHAINS,
                    trees=way not in (LOCK_STEP, CHAINS, PATHS),
                ),
                relay.environment if relay is not None else {},
            )
        )
    servers: dict[str, Server] = {**services}
    other = None
    if settings.peers:
        progress.step(TRANSFORMERS)
        other = await stack.enter_async_context(peer(settings.models, settings.cores))
        servers |= {TRANSFORMERS: Generate(other, None), ASSISTED: Generate(other, DEFAULT)}
    bench = Bench(settings, servers, relay, progress)
    if other is not None:
        await bench.tune(other)
    return bench, services


async def reach(url: str, model: str | None) -> ServerClient:
    """Returns a client of a server that is there. Where it refuses fields beyond OpenAI's own, it is asked
    without.

    Raises Unavailable if none answers, and what it says if it refuses a plain request too."""
    client = ServerClient(url, model, {})
    try:
        name = model or next(iter(await client.models()), None)
    finally:
        await client.close()
    if name is None:
        raise InvalidRequest(f"{url} serves no model at the moment")
    for extras in (EXTRAS, {"stream_options": {"include_usage": True}}, {}):
        client = ServerClient(url, name, extras)
        try:
            await client.ask(Request("Once upon a time", 1, 0.0, 0))
            return client
        except InvalidRequest as refused:
            await client.close()
            if not extras:
                raise refused
        except BaseException:
            await client.close()
            raise
    raise AssertionError("unreachable: the last request is plain")
