"""The other processes of a tensor-parallel worker, as Ray actors of its replica's placement group."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.args import PoolArgs
from outrider.errors import OutriderError, PeerLost
from outrider.worker.garbage import spared_imports

if TYPE_CHECKING:
    from outrider.worker.followers import FollowerSpec

END_SECONDS = 3.0  # that a follower has to end by itself, once the leader has left


@ray.remote(max_restarts=0)
class Follower:
    """One of them. Ray ends it with the replica that started it."""

    def run(self, spec: str) -> None:
        """Follows, and returns when the leader has stopped; `spec` is a FollowerSpec in JSON."""
        claim_threads(json.loads(spec)["options"]["threads"])
        with spared_imports():
            from outrider.telemetry.logs import log_to_stderr, take_over
            from outrider.worker.followers import FollowerSpec, follow

        told = FollowerSpec.from_json(spec)
        log_to_stderr(told.logging)
        take_over()
        follow(told)


class FollowerActors:
    """Implements outrider.engine.ranks.Followers. Made with a pool's args, called with the specs."""

    def __init__(self, specs: Sequence[FollowerSpec], args: PoolArgs) -> None:
        """Starts the followers, that of rank i in bundle i: bundle 0 is the leader's."""
        group = get_current_placement_group()
        assert group is not None, "the deployment has a placement group where tensor_parallel_size > 1"
        self._actors: list[Any] = []
        self._runs: dict[Any, int] = {}  # what an actor runs -> its rank
        for spec in specs:
            rank = spec.group.rank
            actor = Follower.options(  # type: ignore[attr-defined]  # what ray.remote adds
                num_cpus=args.cpus,
                num_gpus=args.gpus_each,
                resources=args.resources,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
            ).remote()
            # Ray shows each process its own GPUs only: each counts them from 0.
            own = spec.options
            seen = spec if own.device == "cpu" else replace(spec, options=replace(own, device="cuda:0"))
            self._actors.append(actor)
            self._runs[actor.run.remote(seen.to_json())] = rank

    def check(self) -> None:
        """Raises PeerLost, with the reason, if one has ended."""
        ended, _ = ray.wait(list(self._runs), timeout=0)
        for run in ended:
            raise PeerLost(f"follower {self._runs[run]} of the tensor-parallel group {_how_it_ended(run)}")

    def stop(self) -> None:
        ray.wait(list(self._runs), num_returns=len(self._runs), timeout=END_SECONDS)
        for actor in self._actors:
            ray.kill(actor)


def claim_threads(count: int) -> None:
    """Makes the number known to the libraries that read it when torch is imported."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(count)


def _how_it_ended(run: Any) -> str:
    try:
        ray.get(run)
    except RayTaskError as error:
        cause = error.cause
        return f"failed: {cause.message if isinstance(cause, OutriderError) else type(cause).__name__}"
    except RayError:
        return "died"
    return "left"
