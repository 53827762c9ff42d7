"""Whether what Serve is told to run fits on the worker groups that Kubernetes is told to keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deploy.args import AppArgs, PoolArgs
from deploy.validation.finding import Finding, Group, Manifest, groups, place
from deploy.validation.serve import FIELD, arguments

GPU = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True)
class Demand:
    """What one replica needs on one node, and how many there may be."""

    argument: str  # router, verifier or drafter
    labels: dict[str, str]
    cpus: float
    gpus: float
    most: int


def check(manifest: Manifest) -> Iterator[Finding]:
    """Findings in a RayService whose arguments are valid; none in anything else."""
    args = arguments(manifest) if manifest.get("kind") == "RayService" else None
    if args is None:
        return
    workers = [group for group in groups(manifest) if group.name != "head"]
    for demand in _demands(args):
        for sentence in _unmet(demand, workers):
            yield Finding(place(manifest, f"{FIELD}: {demand.argument}"), sentence)


def _demands(args: AppArgs) -> Iterator[Demand]:
    router = args.router
    yield Demand("router", router.labels, router.cpus, 0, router.replicas)
    yield _pool("verifier", args.verifier)
    if args.draft is not None or args.target is None:
        yield _pool("drafter", args.drafter)


def _pool(name: str, pool: PoolArgs) -> Demand:
    ranks = pool.tensor_parallel_size  # all on one node
    return Demand(name, pool.labels, pool.cpus * ranks, pool.gpus_each * ranks, pool.max_replicas)


def _unmet(demand: Demand, workers: list[Group]) -> Iterator[str]:
    wanted = ", ".join(f"{key}={value}" for key, value in demand.labels.items())
    matching = [
        group for group in workers if demand.labels.items() <= (group.spec.get("labels") or {}).items()
    ]
    if not matching:
        yield f"asks for nodes with {wanted}, which no worker group has among its labels"
        return
    rooms = {group.name: _room(group, demand) for group in matching}
    if not any(rooms.values()):
        need = f"{demand.cpus:g} CPUs and {demand.gpus:g} GPUs"
        yield f"needs {need} on one node, more than a pod of {', '.join(rooms)} has"
    elif sum(rooms.values()) < demand.most:
        yield f"may have {demand.most} replicas; {', '.join(rooms)} has room for {sum(rooms.values())}"


def _room(group: Group, demand: Demand) -> int:
    """Replicas that fit in the group at its largest."""
    amounts: dict[str, float] = {}
    for container in group.containers[:1]:  # Ray runs in the first
        for kind in ("requests", "limits"):  # a limit wins, as it does for the operator
            for name, amount in ((container.get("resources") or {}).get(kind) or {}).items():
                amounts[name] = cores(str(amount)) if name in ("cpu", GPU) else 0
    fits = [
        int(amounts.get(name, 0) / needed + 1e-9)
        for name, needed in (("cpu", demand.cpus), (GPU, demand.gpus))
        if needed > 0
    ]
    most = group.spec.get("maxReplicas")
    return min(fits, default=1) * (most if most is not None else 2**31 - 1)


def cores(text: str) -> float:
    """2 of "2", .25 of "250m"."""
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)
