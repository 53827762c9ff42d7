"""Decides how large each pool should be: pure decisions on what the workers measure.

A worker's pressure is its load as a share of what it should carry: 1 = just full. A pool should have as many
workers as its pressures add up to. Drafters have a second measure, since one that is always busy may still be
one that is enough: a step drafts for all of its sessions at once. Ray Serve averages the measurements, waits
until a wish has lasted, and keeps to the pool's bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ray.serve.config import AutoscalingContext

from deploy.growth import Growth, Pace, after
from outrider.store.store import WorkerRecord
from outrider.wire.load import VerifierLoad

Stats = Mapping[str, float]  # what a worker measures, by name

KV_FULL = 0.8  # share of the KV pool in use
PRICE_FULL = (
    0.8  # committed tokens that one more token in a step costs: at 1 a new session only takes from others
)
SLACK = 0.75  # a pool shrinks only if the smaller one would be at most this full
STARVED = 0.3  # share of sessions without a draft in a step, above which drafts are wanting
BUSY = 0.5  # mean share of time in draft steps, below which more drafters would bring no more drafts
IDLING = 0.25  # time of one drafter, as a share, that the others take over without being noticed


def verifier_pressure(stats: Stats, max_step_seconds: float | None) -> float:
    """Returns the pressure on a verifier, by its queue, KV pool, price and, with `max_step_seconds`, its
    pace."""
    running, waiting = stats["running"], stats["waiting"]
    pressures = [stats["kv_usage"] / KV_FULL]
    if waiting > 0:
        pressures.append((running + waiting) / max(running, 1.0))
    if running > 0:  # what steps showed before it fell idle says nothing of now
        pressures.append(stats["price"] / PRICE_FULL)
        if max_step_seconds is not None:
            pressures.append(stats["typical_step_seconds"] / max_step_seconds)
    return max(pressures)


def pool_size(workers: int, pressures: Sequence[float]) -> int:
    """Returns how many workers should carry what `workers` carry now. 0 if there is no load at all."""
    load = sum(pressures)
    wanted = math.ceil(load)
    return wanted if wanted >= workers else min(workers, math.ceil(load / SLACK))


def drafters_wanted(workers: int, stats: Sequence[Stats]) -> int:
    """Returns how many drafters there should be, if there are `workers`, which have measured `stats`, at
    least one.

    Drafts that are wanting while drafters are busy call for one more. Time alone never does, but keeps those
    that there are."""
    by_kv = pool_size(workers, [one["kv_usage"] / KV_FULL for one in stats])
    busy = sum(one["busy"] for one in stats)
    if max(one["draft_starvation"] for one in stats) > STARVED and busy >= BUSY * len(stats):
        return max(by_kv, workers + 1)
    return max(by_kv, min(workers, math.ceil(busy - IDLING)))


def need_of_drafts(records: Iterable[WorkerRecord]) -> dict[str, float]:
    """Returns what these verifiers measured of all of their sessions: the share of steps that had no draft,
    and their pace."""
    loads = [record.load for record in records if isinstance(record.load, VerifierLoad)]
    sessions = sum(load.sessions for load in loads)
    starved = sum(load.sessions * load.draft_starvation for load in loads)
    return {
        "draft_starvation": starved / sessions if sessions else 0.0,
        "target_sessions": float(sessions),
        "target_goodput": sum(load.goodput for load in loads if load.sessions),
    }


def by_replica(metrics: Mapping[str, Mapping[Any, float]] | None) -> list[dict[str, float]]:
    """Turns {name: {replica: value}} into each replica's {name: value}, of replicas that have said
    everything."""
    metrics = metrics or {}
    replicas: dict[Any, dict[str, float]] = {}
    for name, values in metrics.items():
        for replica, value in values.items():
            replicas.setdefault(replica, {})[name] = value
    return [stats for stats in replicas.values() if len(stats) == len(metrics)]


class VerifierPolicy:
    """For Ray Serve's autoscaler; made once in its controller."""

    def __init__(self, max_step_seconds: float | None = None) -> None:
        self._max_step_seconds = max_step_seconds

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        known = by_replica(context.aggregated_metrics)
        if not known:  # nobody has said anything yet
            return context.target_num_replicas, {}
        pressures = [verifier_pressure(stats, self._max_step_seconds) for stats in known]
        return pool_size(context.target_num_replicas, pressures), {}


class DrafterPolicy:
    """For Ray Serve's autoscaler; made once in its controller."""

    def __init__(self, settle_seconds: float) -> None:
        """`settle_seconds`: after which the measurements show what a new drafter has changed."""
        self._settle_seconds = settle_seconds
        self._growth = Growth()

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        known, workers = by_replica(context.aggregated_metrics), context.target_num_replicas
        if not known:
            return workers, {}
        now = context.current_time or 0.0
        goodput = sum(one["target_goodput"] for one in known) / len(known)
        sessions = sum(one["target_sessions"] for one in known) / len(known)
        pace = Pace(goodput, sessions)
        self._growth = after(self._growth, workers, len(known), pace, now, self._settle_seconds)
        return self._growth.allowed(drafters_wanted(workers, known), now), {}
