"""The Verifier and Drafter deployments: a worker in a replica.

Requests never pass through these replicas. Each starts its worker's own gRPC server on its node's address and
registers it; Ray Serve places it, watches its health, replaces it and decides how many there are.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError

from deploy.args import NetworkArgs, PoolArgs, VerifierArgs
from deploy.autoscaling import need_of_drafts
from deploy.followers import FollowerActors, claim_threads
from deploy.registry import StoreSource, open_store, present
from outrider.errors import OutriderError, PeerLost, Unhealthy
from outrider.options.option import build, options
from outrider.telemetry.logs import log_to_stderr, take_over
from outrider.wire.hello import Role
from outrider.worker.garbage import spare_what_is_there, spared_imports

if TYPE_CHECKING:
    from drafter.config import DrafterConfig
    from outrider.worker.worker import Worker
    from verifier.config import VerifierConfig

# Imported where a worker starts, so that only its replica loads torch: verifier.service, drafter.service.

log = logging.getLogger(__name__)


class Replica:
    """What both deployments do around their worker."""

    _worker: Worker
    _probe_seconds: float

    async def _start(self, worker: Worker, probe_seconds: float) -> None:
        take_over()
        self._worker = worker
        self._probe_seconds = probe_seconds
        await worker.start()
        spare_what_is_there()
        self._end = asyncio.create_task(worker.wait())

    async def check_health(self) -> None:
        """Raises if the worker does not work.

        A worker that has ended (a process of its tensor-parallel group is gone, a router refuses it) is told
        as the death of an actor: such a replica is replaced at once, where others have three tries.
        """
        if self._end.done():
            reason = _reason(self._end)
            log.error("the worker has ended: %s", reason)
            raise RayActorError(error_msg=f"the worker has ended: {reason}")
        try:
            await self._worker.check(self._probe_seconds)
        except Unhealthy as error:
            if isinstance(error.__cause__, PeerLost):
                raise RayActorError(error_msg=error.message) from None
            raise

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return self._worker.stats()


class VerifierReplica(Replica):
    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, target: str, name: str | None, args: VerifierArgs, network: NetworkArgs, source: StoreSource
    ) -> None:
        log_to_stderr(network.logging)
        claim_threads(max(args.threads, args.resting_threads or 0))
        with spared_imports():
            from verifier.service import start

        config = verifier_config(target, name, args, network, _node_address())
        self._drain_seconds = config.drain_seconds
        followers = partial(FollowerActors, args=args)
        await self._start(await start(config, open_store(source), followers), args.probe_seconds)

    async def __del__(self) -> None:
        """Takes no new sessions before the replica goes; those that are there end, or go on elsewhere."""
        await self._worker.drain(self._drain_seconds)
        await self._worker.stop()


class DrafterReplica(Replica):
    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        draft: str | None,
        propose: str | None,
        args: PoolArgs,
        network: NetworkArgs,
        source: StoreSource,
    ) -> None:
        log_to_stderr(network.logging)
        claim_threads(args.threads)
        with spared_imports():
            from drafter.service import start

        self._store = open_store(source)
        config = drafter_config(draft, propose, args, network, _node_address())
        followers = partial(FollowerActors, args=args)
        await self._start(await start(config, self._store, followers), args.probe_seconds)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the stats with what verifiers say of drafts: a drafter does not see sessions that have
        none."""
        records = (await present(self._store)).values()
        verifiers = [record for record in records if record.info.identity.role is Role.VERIFIER]
        return {**self._worker.stats(), **need_of_drafts(verifiers)}

    async def __del__(self) -> None:
        await self._worker.stop()


def verifier_config(
    target: str, name: str | None, args: VerifierArgs, network: NetworkArgs, host: str
) -> VerifierConfig:
    """Raises StartupError."""
    from verifier.config import VerifierConfig

    return build(VerifierConfig, _told(args, network, host) | {"target": target, "name": name})


def drafter_config(
    draft: str | None, propose: str | None, args: PoolArgs, network: NetworkArgs, host: str
) -> DrafterConfig:
    """Raises StartupError."""
    from drafter.config import DrafterConfig

    return build(DrafterConfig, _told(args, network, host) | {"draft": draft, "propose": propose})


def _told(args: PoolArgs, network: NetworkArgs, host: str) -> dict[str, Any]:
    """Returns what a worker on that node is told, as the configurations name it."""
    host = network.host or host
    protection = {told.name: told.default for told in options(network.protection)}
    export = asdict(network.export)
    return {**dict(args), **protection, **export, "host": host, "advertise": network.advertised(host)}


def _nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def _node_address() -> str:
    """Returns the address by which other nodes reach this one, as the cluster knows it."""
    here = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in _nodes() if node["NodeID"] == here)


def _reason(end: asyncio.Task[None]) -> str:
    if end.cancelled() or (error := end.exception()) is None:
        return "it was stopped"
    return error.message if isinstance(error, OutriderError) else type(error).__name__
