"""Checks Serve's configuration in a RayService: Ray's schema, our application's arguments, room for its
replicas."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import yaml
from ray.serve.schema import ServeDeploySchema

from deploy.args import AppArgs, PoolArgs, RouterArgs, parse
from deploy.validate.manifest import Group, Manifest, groups
from deploy.validate.schema import Problem, check, strict
from outrider.errors import StartupError

OURS = "deploy.app:build"
FIELD = "spec.serveConfigV2"
GPU = "nvidia.com/gpu"


def check_service(rayservice: Manifest) -> Iterator[Problem]:
    """Yields what is wrong with the configuration; otherwise, which of its replicas have no room."""
    problems = list(check_text(rayservice["spec"].get("serveConfigV2") or ""))
    for path, sentence in problems or check_room(rayservice):
        yield f"{FIELD}: {path}" if path else FIELD, sentence


def check_text(text: str) -> Iterator[Problem]:
    """Yields the problems of a configuration as `serve deploy` takes it."""
    try:
        config = yaml.safe_load(text)
        yield from check(config, strict(ServeDeploySchema.model_json_schema()))
        ServeDeploySchema.model_validate(config)
    except (yaml.YAMLError, ValueError) as error:
        yield "", f"is refused: {' '.join(str(error).split())}"
        return
    for i, name in enumerate((config.get("grpc_options") or {}).get("grpc_servicer_functions") or []):
        if not _has(*name.rpartition(".")[::2]):
            yield f"grpc_options.grpc_servicer_functions[{i}]", f"there is no {name} to import"
    for i, application in enumerate(config["applications"]):
        name = application["import_path"]
        if name.startswith("deploy.") and not _has(*name.partition(":")[::2]):
            yield f"applications[{i}].import_path", f"there is no {name} to import"
        if name == OURS:
            try:
                parse(application.get("args") or {})
            except StartupError as error:
                yield f"applications[{i}].args", error.message


def _has(module: str, name: str) -> bool:
    """Returns True if Serve could import it when it starts: a typing error would show on the cluster only."""
    try:
        return hasattr(importlib.import_module(module), name)
    except (ImportError, ValueError):
        return False


def arguments(rayservice: Manifest) -> AppArgs | None:
    """Returns the arguments of our application in a RayService whose configuration is valid; None if there is
    none."""
    config = yaml.safe_load(rayservice["spec"].get("serveConfigV2") or "applications: []")
    found = [entry for entry in config["applications"] if entry["import_path"] == OURS]
    return parse(found[0].get("args") or {}) if found else None


def check_room(rayservice: Manifest) -> Iterator[Problem]:
    """Yields which replicas fit on no pod of the worker groups, or not as many as Serve may want."""
    args = arguments(rayservice)
    if args is None:
        return
    pools: dict[str, RouterArgs | PoolArgs] = {"router": args.router, "verifier": args.verifier}
    if args.has_drafters:
        pools["drafter"] = args.drafter
    if args.both:
        pools["propose"] = args.lookup
    for name, pool in pools.items():
        if sentence := _unmet(pool, groups(rayservice)[1:]):
            yield name, sentence


def _unmet(pool: RouterArgs | PoolArgs, workers: list[Group]) -> str | None:
    matching = [group for group in workers if pool.labels.items() <= (group.spec.get("labels") or {}).items()]
    if not matching:
        wanted = ", ".join(f"{key}={value}" for key, value in pool.labels.items())
        return f"asks for nodes with {wanted}, which no worker group has among its labels"
    if isinstance(pool, RouterArgs):
        cpus, gpus, most = pool.cpus, 0.0, pool.replicas
    else:  # all processes of one worker are on one node
        ranks = pool.engine.tensor_parallel_size
        cpus, gpus, most = pool.cpus * ranks, pool.gpus_each * ranks, pool.max_replicas
    names, room = ", ".join(group.name for group in matching), sum(_room(g, cpus, gpus) for g in matching)
    if not room:
        return f"needs {cpus:g} CPUs and {gpus:g} GPUs on one node, more than a pod of {names} has"
    return f"may have {most} replicas; {names} has room for {room}" if room < most else None


def _room(group: Group, cpus: float, gpus: float) -> int:
    """Returns how many replicas fit in the group at its largest. Ray runs in the first container."""
    resources: dict[str, Any] = group.containers[0].get("resources") or {}
    amounts = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}  # as the operator does
    wanted = {"cpu": cpus, GPU: gpus}
    fits = [int(cores(amounts.get(name, "0")) / need + 1e-9) for name, need in wanted.items() if need > 0]
    return min(fits, default=1) * int(group.spec.get("maxReplicas", 2**31 - 1))


def cores(amount: str | int) -> float:
    """Returns the number of cores: 2 for "2", .25 for "250m"."""
    text = str(amount)
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)
