"""Our own services as a run needs them: real processes, each role on cores of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from outrider.errors import StartupError, Unavailable
from outrider.options.sessions import SessionOptions
from outrider_cli.bench.client import Came, Reply, Request, ServerClient
from outrider_cli.bench.figures import Rejections
from outrider_cli.bench.group import Seconds, cpu_clock
from outrider_cli.bench.placing import Cores
from outrider_cli.children import Models, Workers, router_child, worker_children
from outrider_cli.serve import reachable, router_addresses
from outrider_cli.supervisor import ChildDied, ChildSpec, Supervisor
from router.config import RouterConfig

DRAFTER_TELLS_SECONDS = 1.0  # within which a drafter has told its router what it has counted
EXTRAS: dict[str, object] = {  # fields beyond OpenAI's that a fair measurement wants
    "ignore_eos": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


class Quiet:
    """A supervisor's Display that keeps what went wrong."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def starting(self, name: str) -> None: ...
    def ready(self, name: str) -> None: ...

    def line(self, name: str, text: str) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


class Service:
    """A running service of ours: asked over HTTP, its processes' CPU clocks read."""

    def __init__(
        self, client: ServerClient, pids: Mapping[str, int], addresses: Mapping[str, str], display: Quiet
    ) -> None:
        self._client = client
        self.pids = pids  # of target, draft and router
        self.addresses = addresses  # host:port of each, where others of its service reach it
        self._display = display

    @property
    def url(self) -> str:
        return self._client.url

    async def ask(self, request: Request, came: Came | None = None) -> Reply:
        return await self._client.ask(request, came)

    async def rejections(self) -> Rejections:
        """Returns the rejections that its drafter has counted so far."""
        await asyncio.sleep(DRAFTER_TELLS_SECONDS)
        name = "outrider_draft_rejections"
        return Rejections(
            round(await self._client.counted(name)), round(await self._client.counted(f"{name}_covered"))
        )

    def cpu(self) -> Seconds:
        try:
            return {role: cpu_clock(pid) for role, pid in self.pids.items()}
        except OSError:
            raise Unavailable(f"a service is not what it was: {'; '.join(self._display.notes)}") from None


@asynccontextmanager
async def service(
    models: Models,
    cores: Cores,
    sessions: SessionOptions,
    workers: Workers,
    drafter_environment: Mapping[str, str] | None = None,
    drafting: Workers | None = None,
) -> AsyncIterator[Service]:
    """Starts router, verifier and, where `models` has a draft, drafter; ends them at the end.

    Each model has as many threads as it has cores, unless `workers` says how many. `drafting`: how drafters
    are run; None = as verifiers. Raises StartupError with what a process said if it ends too early."""
    display = Quiet()
    supervisor = Supervisor(display)
    router = router_child(
        models,
        RouterConfig(port=0, grpc_port=0, sessions=replace(sessions, lock_step=workers.lock_step)),
        workers.logging,
    )
    try:
        said = await supervisor.start(behind(router, cores.prefix(cores.router or cores.draft)))
        url, grpc_address, _ = (reachable(address) for address in router_addresses(said))
        verifier = worker_children(
            replace(models, draft=None, propose=None), with_threads(workers, len(cores.target)), grpc_address
        )
        drafting = with_threads(drafting or workers, len(cores.draft))
        drafter = worker_children(models, drafting, grpc_address)[1:]
        variables = ("env", *(f"{name}={value}" for name, value in (drafter_environment or {}).items()))
        children = [
            *(behind(child, cores.prefix(cores.target)) for child in verifier),
            *(behind(child, (*cores.prefix(cores.draft), *variables)) for child in drafter),
        ]
        roles = {"target": "verifier", "draft": "drafter", "router": "router"}
        addresses = {"router": grpc_address}
        for child in children:  # one after the other: each measures at its start how fast it is
            addresses[child.name] = (await supervisor.start(child)).split()[0]
        names = {child.name for child in (router, *children)}
        pids = {role: supervisor.pid(name) for role, name in roles.items() if name in names}
        where = {role: addresses[name] for role, name in roles.items() if name in names}
        client = ServerClient(url, models.name, EXTRAS)
        try:
            yield Service(client, pids, where, display)
        finally:
            await client.close()
    except ChildDied as death:
        raise StartupError(str(death)) from None
    finally:
        await supervisor.stop()


def with_threads(workers: Workers, threads: int) -> Workers:
    """Returns the same workers, with so many threads if their options name no number."""
    return replace(workers, engine=replace(workers.engine, threads=workers.engine.threads or threads))


def behind(child: ChildSpec, prefix: Sequence[str]) -> ChildSpec:
    """Returns the same child, started by the programs of `prefix`. They become it: its process id is
    theirs."""
    return replace(child, command=(*prefix, *child.command))
