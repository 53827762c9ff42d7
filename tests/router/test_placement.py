"""Placement decides by what workers say and what was placed, and the same way every time."""

import dataclasses
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.wire.load import DrafterLoad, VerifierLoad
from router.placement import (
    AFFINITY_TOKENS,
    MAX_AFFINITY,
    DrafterCandidate,
    VerifierCandidate,
    choose_drafter,
    choose_verifier,
    goodput,
    round_trip,
)

HOST = "10.0.0.1:50"


def verifier(
    worker_id: str, *, model: str = "m", placed: int = 0, room: int = 10_000, cached: int = 0, **load: float
) -> VerifierCandidate:
    loaded = dataclasses.replace(VerifierLoad(), **load)
    return VerifierCandidate(worker_id, model, loaded, placed, room, cached)


def drafter(
    worker_id: str,
    *,
    tokenizer: str = "t",
    address: str = "10.0.0.1:1",
    placed: int = 0,
    acceptance: float = 0.7,
    **load: Any,
) -> DrafterCandidate:
    loaded = dataclasses.replace(DrafterLoad(), **load)
    return DrafterCandidate(worker_id, 1, tokenizer, address, loaded, placed, acceptance)


def chosen(*candidates: VerifierCandidate, prompt: int = 100, most: int = 0, **more: Any) -> str | None:
    best = choose_verifier(candidates, "m", prompt, most, **more)
    return None if best is None else best.worker_id


def drafting(*candidates: DrafterCandidate, excluded: frozenset[tuple[str, int]] = frozenset()) -> str | None:
    return choose_drafter(candidates, "t", HOST, excluded)


# Verifiers.


def test_text_goes_on_with_the_same_numerics_while_there_is_one() -> None:
    alike, other = (
        dataclasses.replace(verifier(name, **load), numerics=numerics)
        for name, numerics, load in (("z", "float32-1", {"waiting": 9}), ("a", "bfloat16-2", {}))
    )
    leaving = dataclasses.replace(alike, load=dataclasses.replace(alike.load, draining=True))

    def going_on(
        *candidates: VerifierCandidate, numerics: str = "float32-1", same: bool = False
    ) -> str | None:
        return chosen(*candidates, numerics=numerics, same_numerics=same)

    assert going_on(alike, other) == "z"
    assert going_on(alike, other, numerics="") == "a", "there is no text yet"
    assert going_on(other) == going_on(leaving, other) == "a"
    assert going_on(other, same=True) is going_on(leaving, other, same=True) is None
    assert going_on(alike, other, same=True) == "z"
    assert going_on(other, numerics="", same=True) == "a"


def test_nobody_is_sent_where_sessions_wait_while_another_has_room() -> None:
    assert chosen(verifier("a", waiting=1), verifier("b", running=9)) == "b"
    assert chosen(verifier("a", waiting=1, cached=96), verifier("b", running=9, waiting=0)) == "b"
    assert chosen(verifier("a", waiting=2), verifier("b", waiting=1, running=9)) == "b"


def test_a_prompt_goes_where_it_fits_into_the_free_kv_blocks() -> None:
    full, free = verifier("a", room=1000, kv_usage=0.95), verifier("b", room=1000, running=9, kv_usage=0.8)
    assert chosen(full, free, prompt=100) == "b"
    assert chosen(full, free, prompt=40) == "a"
    # What is in its cache needs no room.
    assert chosen(dataclasses.replace(full, cached_tokens=64), free, prompt=100) == "a"


def test_a_session_goes_where_all_that_it_may_become_can_be_held() -> None:
    small, large = verifier("a", room=1000), verifier("b", room=2000, waiting=3)
    assert chosen(small, large, most=1000) == "a"
    assert chosen(small, large, most=1001) == "b"
    assert chosen(small, most=1001) is None  # which would refuse it: another may come
    assert chosen(dataclasses.replace(large, context=1000), most=1001) is None


def test_then_the_fewest_sessions_then_the_emptier_pool_and_the_lower_price() -> None:
    assert chosen(verifier("a", running=3), verifier("b", running=2, kv_usage=0.4)) == "b"
    assert chosen(verifier("a", kv_usage=0.8), verifier("b", kv_usage=0.2)) == "b"
    assert chosen(verifier("a", price=0.8), verifier("b", price=0.2)) == "b"


def test_of_those_that_are_nearly_as_good_one_is_drawn() -> None:
    near = [verifier("a", kv_usage=0.1), verifier("b"), verifier("c", price=0.3), verifier("d", running=1)]
    draws = {chosen(*near, below=lambda count, at=at: at % count) for at in range(12)}
    assert draws == {"a", "b", "c"}
    cached = [*near, verifier("e", kv_usage=0.2, cached=32), verifier("f", kv_usage=0.9, cached=32)]
    assert chosen(*cached, below=lambda count: count - 1) == "e"
    drafters = [drafter("a", token_seconds=0.0102), drafter("b", token_seconds=0.01), drafter("c", placed=1)]
    draws = {choose_drafter(drafters, "t", HOST, below=lambda count, at=at: at % count) for at in range(6)}
    assert draws == {"a", "b"}


def test_sessions_placed_since_the_last_report_count() -> None:
    assert chosen(verifier("a", placed=4, running=1), verifier("b", running=2)) == "b"
    others = dataclasses.replace(verifier("a", placed=2, running=20), unreported=2)  # 18 are of other routers
    assert chosen(others, verifier("b", running=21)) == "b"
    assert (
        drafting(
            dataclasses.replace(drafter("a", sessions=3, placed=2), unreported=2), drafter("b", sessions=4)
        )
        == "b"
    )


def test_only_verifiers_of_the_model_that_do_not_drain_are_chosen() -> None:
    assert chosen(verifier("a", model="other"), verifier("b", running=50)) == "b"
    assert chosen(verifier("a", draining=True), verifier("b", running=50)) == "b"
    assert chosen(verifier("a", draining=True)) is None
    assert chosen(verifier("a", model="other")) is None
    assert chosen() is None


def test_a_session_goes_where_its_prefix_is_cached() -> None:
    assert chosen(verifier("a"), verifier("b", cached=32)) == "b"
    assert chosen(verifier("a", cached=64), verifier("b", cached=2 * AFFINITY_TOKENS)) == "b"


def test_a_cached_prefix_is_worth_some_sessions_but_no_more() -> None:
    long = 100 * AFFINITY_TOKENS
    few, many = int(MAX_AFFINITY) - 1, int(MAX_AFFINITY) + 1
    assert chosen(verifier("a"), verifier("b", running=few, cached=long, room=10**6), prompt=long) == "b"
    assert chosen(verifier("a", room=10**6), verifier("b", running=many, cached=long), prompt=long) == "a"


def test_requests_that_all_begin_alike_do_not_pile_up_on_one_verifier() -> None:
    sessions = {"a": 0, "b": 0, "c": 0}
    cached = dict.fromkeys(sessions, 0)
    for _ in range(30):
        place = chosen(
            *(verifier(name, placed=count, cached=cached[name]) for name, count in sessions.items()),
            prompt=2000,
        )
        assert place is not None
        sessions[place] += 1
        cached[place] = 2000
    assert max(sessions.values()) - min(sessions.values()) <= MAX_AFFINITY + 1


# Drafters.


def test_only_drafters_of_the_tokenizer_that_did_not_give_up_are_chosen() -> None:
    candidates = [drafter("a", tokenizer="other"), drafter("b", sessions=1), drafter("c", sessions=2)]
    assert drafting(*candidates) == "b"
    assert drafting(*candidates, excluded=frozenset({("b", 1)})) == "c"
    assert drafting(*candidates, excluded=frozenset({("b", 2)})) == "b"  # it was restarted since
    assert drafting(*candidates, excluded=frozenset({("b", 1), ("c", 1)})) is None
    assert drafting() is None


def test_equal_drafters_share_the_sessions() -> None:
    assert drafting(drafter("a", placed=3), drafter("b", sessions=2)) == "b"


def test_the_better_accepted_the_faster_and_the_nearer_drafter_is_chosen() -> None:
    assert drafting(drafter("a", acceptance=0.5), drafter("b", acceptance=0.8)) == "b"
    slow, fast = drafter("a", token_seconds=0.02), drafter("b", token_seconds=0.01)
    assert drafting(slow, fast) == "b"
    far = drafter("a", round_trips={HOST: 0.02}, token_seconds=0.001)
    near = drafter("b", round_trips={HOST: 0.001, "10.0.0.9:50": 0.5}, token_seconds=0.001)
    assert drafting(far, near) == "b"


def test_without_a_measurement_the_same_host_is_nearer() -> None:
    remote = drafter("a", address="10.0.0.2:1", token_seconds=0.001)
    local = drafter("b", address="10.0.0.1:2", token_seconds=0.001)
    assert drafting(remote, local) == "b"
    assert round_trip(local, HOST) < round_trip(remote, HOST)
    measured = drafter("c", address="10.0.0.2:1", token_seconds=0.001, round_trips={HOST: 0.0})
    assert drafting(remote, local, measured) == "c"


def test_a_better_drafter_gets_more_sessions_but_not_all() -> None:
    fast, slow = drafter("fast", token_seconds=0.001), drafter("slow", token_seconds=0.004)
    placed = {"fast": 0, "slow": 0}
    for _ in range(50):
        place = drafting(*(dataclasses.replace(one, placed=placed[one.worker_id]) for one in (fast, slow)))
        assert place is not None
        placed[place] += 1
    assert 2 * placed["slow"] < placed["fast"] < 50
    assert placed["slow"] > 5


def test_a_drafter_whose_pace_is_unknown_gets_its_chance() -> None:
    assert drafting(drafter("a", token_seconds=0.01, sessions=1), drafter("b")) == "b"
    assert drafting(drafter("a", token_seconds=0.01), drafter("b", sessions=1)) == "a"


def test_goodput_as_computed_by_hand() -> None:
    # a = .8: 4 accepted between two rejections, 5 drafted: 4 / (5 * .01 + .03)
    assert goodput(0.8, 0.01, 0.03) == pytest.approx(50)
    assert goodput(0.5, 0.01, 0.0) == pytest.approx(50)


@given(st.floats(), st.floats(), st.floats())
def test_goodput_is_positive_and_finite_whatever_is_reported(a: float, pace: float, trip: float) -> None:
    assert 0 < goodput(a, pace, trip) < math.inf


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.floats(),
    st.floats(),
    st.randoms(use_true_random=False),
)
def test_the_choice_does_not_depend_on_the_order_nor_on_nonsense_that_all_report(
    sessions: list[int], nonsense: float, more: float, shuffler: random.Random
) -> None:
    verifiers = [
        verifier(f"w{index}", running=count, price=nonsense, kv_usage=more)
        for index, count in enumerate(sessions)
    ]
    drafters = [
        drafter(f"w{index}", sessions=count, token_seconds=nonsense, round_trips={HOST: more})
        for index, count in enumerate(sessions)
    ]
    expected = f"w{sessions.index(min(sessions))}"
    shuffler.shuffle(verifiers)
    shuffler.shuffle(drafters)
    assert chosen(*verifiers) == expected
    assert drafting(*drafters) == expected


def test_a_drafter_without_a_tokenizer_is_one_for_every_target() -> None:
    assert choose_drafter([drafter("a", tokenizer="u"), drafter("b", tokenizer="")], "t", HOST) == "b"
