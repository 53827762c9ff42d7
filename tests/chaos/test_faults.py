"""Which faults a storm draws, and which it never does."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.chaos.cluster import MEMBERS
from tests.chaos.faults import (
    GAP_SECONDS,
    LOG_SECONDS,
    OF_ROLE,
    SETTLED_SECONDS,
    Fault,
    Health,
    Kind,
    allowed,
    opening,
    proposals,
    role_of,
)

WELL = dict.fromkeys(MEMBERS, 100.0)


def some(seed: int = 1, without: tuple[Kind, ...] = ()) -> list[Fault]:
    return list(islice(proposals(seed, MEMBERS, without), 2000))


def fault(target: str, kind: Kind = Kind.KILL) -> Fault:
    return Fault(kind, target, 1.0, 3.0)


def test_the_seed_decides() -> None:
    assert some(1) == some(1) != some(2)


def test_every_kind_of_every_role_is_drawn_and_every_process() -> None:
    drawn = {(role_of(one.target), one.kind) for one in some()}
    assert drawn == {(role, kind) for role, kinds in OF_ROLE.items() for kind in kinds}
    assert {one.target for one in some()} == set(MEMBERS)


def test_kinds_can_be_left_out() -> None:
    assert Kind.CUT not in {one.kind for one in some(without=(Kind.CUT,))}


def test_what_a_storm_begins_with_is_what_it_was_told_at_places_that_the_seed_decides() -> None:
    kinds = [("router", Kind.KILL), ("redis", Kind.EMPTY), ("router", Kind.CUT)]
    found = opening(1, kinds, MEMBERS)
    assert [(role_of(one.target), one.kind) for one in found] == kinds
    assert found == opening(1, kinds, MEMBERS)
    assert {opening(seed, kinds, MEMBERS)[0].target for seed in range(20)} == {"router-1", "router-2"}


def test_one_comes_every_three_to_five_seconds() -> None:
    assert all(GAP_SECONDS[0] <= one.wait <= GAP_SECONDS[1] for one in some())


@pytest.mark.parametrize("target", ["router-1", "verifier-2", "drafter-3", "redis-", "rogue"])
def test_where_all_are_well_all_is_allowed(target: str) -> None:
    assert allowed(fault("redis" if target == "redis-" else target), Health(WELL))


@pytest.mark.parametrize("role", ["router", "verifier"])
@pytest.mark.parametrize("kind", [Kind.KILL, Kind.FREEZE, Kind.CUT])
def test_the_last_router_and_the_last_verifier_are_left_alone(role: str, kind: Kind) -> None:
    one, other = f"{role}-1", f"{role}-2"
    alone = {name: since for name, since in WELL.items() if name != other}
    assert not allowed(fault(one, kind), Health(alone))
    assert not allowed(fault(one, kind), Health({**WELL, other: SETTLED_SECONDS - 1}))
    assert allowed(fault(one, kind), Health({**WELL, other: SETTLED_SECONDS}))


def test_all_drafters_may_be_hurt_at_once() -> None:
    assert allowed(fault("drafter-1"), Health({**WELL, "drafter-2": 0.0, "drafter-3": 0.0}))
    few = {name: since for name, since in WELL.items() if name not in ("drafter-2", "drafter-3")}
    assert allowed(fault("drafter-1"), Health(few))


def test_what_is_hurt_is_not_hurt_again() -> None:
    assert not allowed(fault("drafter-1"), Health({"drafter-2": 9.0}))


def test_a_router_is_not_lost_with_the_only_copy_of_its_log() -> None:
    without = {name: since for name, since in WELL.items() if name != "redis"}
    assert not allowed(fault("router-1"), Health(without))
    assert not allowed(fault("router-1"), Health(WELL, LOG_SECONDS - 1))
    assert allowed(fault("router-1"), Health(WELL, LOG_SECONDS))
    lost = {name: since for name, since in WELL.items() if name != "router-2"}
    assert not allowed(fault("redis", Kind.EMPTY), Health(lost))
    assert allowed(fault("redis", Kind.RESTART), Health(lost))
    assert allowed(fault("redis", Kind.EMPTY), Health(WELL))
