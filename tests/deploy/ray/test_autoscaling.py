"""How large each pool should be: the decisions alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deploy import autoscaling
from deploy.autoscaling import (
    DrafterPolicy,
    VerifierPolicy,
    by_replica,
    drafters_wanted,
    need_of_drafts,
    pool_size,
    verifier_pressure,
)
from outrider.wire.load import DrafterLoad, VerifierLoad

IDLE = {
    "running": 0.0,
    "waiting": 0.0,
    "kv_usage": 0.0,
    "price": 0.0,
    "typical_step_seconds": 0.0,
    "draft_starvation": 0.0,
}


def verifier(**measured: float) -> dict[str, float]:
    return IDLE | measured


def drafter(busy: float = 0.0, kv_usage: float = 0.0, draft_starvation: float = 0.0) -> dict[str, float]:
    pace = {"target_goodput": 100.0, "target_sessions": 4.0}
    return {"busy": busy, "kv_usage": kv_usage, "draft_starvation": draft_starvation, **pace}


def context(target: int, *stats: dict[str, float]) -> Any:
    names = stats[0] if stats else {}
    metrics = {name: {index: values[name] for index, values in enumerate(stats)} for name in names}
    return SimpleNamespace(target_num_replicas=target, aggregated_metrics=metrics or None, current_time=0.0)


def test_a_verifier_is_pressed_by_its_queue_its_kv_pool_and_its_steps() -> None:
    assert verifier_pressure(IDLE, 0.1) == 0
    assert verifier_pressure(verifier(running=4, waiting=4), None) == 2
    assert verifier_pressure(verifier(running=4, kv_usage=0.8), None) == 1
    dear = verifier(running=4, price=0.8)
    assert verifier_pressure(dear, None) == 1
    assert verifier_pressure(dear | {"running": 0.0}, None) == 0
    slow = verifier(running=4, typical_step_seconds=0.3)
    assert verifier_pressure(slow, 0.1) == pytest.approx(3)
    assert verifier_pressure(slow, None) == 0
    assert verifier_pressure(slow | {"running": 0.0}, 0.1) == 0, (
        "the last steps of one that rests say nothing"
    )


@pytest.mark.parametrize(
    ("workers", "pressures", "size"),
    [
        (1, [0.0], 0),
        (1, [1.0], 1),
        (1, [1.1], 2),
        (2, [1.5, 1.6], 4),
        (2, [0.8, 0.1], 2),  # one would be over SLACK
        (2, [0.5, 0.2], 1),
        (4, [0.4] * 4, 3),
    ],
)
def test_a_pool_has_as_many_workers_as_pressures_add_up_to(
    workers: int, pressures: list[float], size: int
) -> None:
    assert pool_size(workers, pressures) == size


def test_a_steady_load_does_not_make_the_pool_swing() -> None:
    """What a pool grows to for a load, it stays at for that load."""
    for hundredths in range(1, 800):
        load = hundredths / 100
        grown = pool_size(1, [load])
        assert pool_size(grown, [load / grown] * grown) == grown


def test_drafters_grow_where_drafts_are_wanting_and_drafters_are_busy() -> None:
    def wanted(workers: int, **measured: float) -> int:
        return drafters_wanted(workers, [drafter(**measured)] * workers)

    assert wanted(2, busy=0.6, draft_starvation=0.5) == 3
    assert wanted(2, busy=0.7, draft_starvation=0.1) == 2
    assert wanted(2, busy=0.1, draft_starvation=0.9) == 0, "it is not drafters that are wanting"
    assert wanted(1, busy=1.0) == 1, "one that is always busy may be enough"
    assert wanted(2, kv_usage=1.0) == 3
    assert wanted(2, busy=0.6, kv_usage=1.0, draft_starvation=0.5) == 3


def test_drafters_shrink_to_those_that_are_busy() -> None:
    assert drafters_wanted(2, [drafter(busy=1.0), drafter(busy=0.1)]) == 1
    assert drafters_wanted(2, [drafter(busy=0.9), drafter(busy=0.5)]) == 2
    assert drafters_wanted(3, [drafter(busy=0.4)] * 3) == 1
    assert drafters_wanted(3, [drafter(busy=0.4, kv_usage=0.6)] * 3) == 3


def test_the_need_of_drafts_is_that_of_all_sessions() -> None:
    def record(sessions: int, draft_starvation: float) -> Any:
        load = VerifierLoad(running=sessions, draft_starvation=draft_starvation, goodput=100.0)
        return SimpleNamespace(load=load)

    def need(*records: Any) -> list[float]:
        return list(need_of_drafts(records).values())

    assert need() == [0, 0, 0]
    assert need(record(0, 1.0)) == [0, 0, 0], "what one did before it fell idle says nothing of now"
    assert need(record(3, 0.2), record(1, 1.0)) == [pytest.approx(0.4), 4, 200]


def test_a_replica_that_has_said_only_some_things_is_left_out() -> None:
    assert by_replica(None) == []
    assert by_replica({"a": {"x": 1.0, "y": 2.0}, "b": {"x": 3.0}}) == [{"a": 1.0, "b": 3.0}]


def test_the_policies_say_what_the_pools_should_be() -> None:
    assert VerifierPolicy()(context(1)) == (1, {}), "nobody has said anything yet"
    assert VerifierPolicy()(context(1, verifier(running=2, waiting=3))) == (3, {})
    assert VerifierPolicy(0.01)(context(1, verifier(running=1, typical_step_seconds=0.02))) == (2, {})
    assert DrafterPolicy(20)(context(2)) == (2, {})
    assert DrafterPolicy(20)(context(1, drafter(busy=0.5, draft_starvation=0.9))) == (2, {})
    assert DrafterPolicy(20)(context(2, drafter(), drafter())) == (0, {}), (
        "Serve keeps to the least of the pool"
    )


def test_every_name_that_a_policy_reads_is_measured() -> None:
    """The workers' own stats have every name; the rest is added in deploy/workers.py."""
    from drafter.service import DrafterService
    from verifier.service import VerifierService

    assert autoscaling.verifier_pressure(stats_of(VerifierService), 1.0) == 0
    drafter_stats = stats_of(DrafterService) | need_of_drafts([])
    assert autoscaling.drafters_wanted(1, [drafter_stats]) == 0


def stats_of(service: type[Any]) -> dict[str, float]:
    """Returns the statistics that a worker gives before it has done anything."""
    model = SimpleNamespace(vocab_size=1, name="draft")
    info = SimpleNamespace(kv_blocks=1, kv_block_size=1, identity=None, model=model)
    idle = service(info, None)
    idle.use(SimpleNamespace(load=idle_load(service), busy_seconds=0.0))
    found: dict[str, float] = idle.stats()
    return found


def idle_load(service: type[Any]) -> VerifierLoad | DrafterLoad:
    return VerifierLoad() if "Verifier" in service.__name__ else DrafterLoad()
