"""Placement decides by load, and the same way every time."""

import dataclasses
import random

from hypothesis import given
from hypothesis import strategies as st

from router.load import DrafterLoad, VerifierLoad
from router.placement import DrafterCandidate, VerifierCandidate, choose_drafter, choose_verifier


def verifier(worker_id: str, *, model: str = "m", placed: int = 0, **load: float) -> VerifierCandidate:
    return VerifierCandidate(worker_id, model, dataclasses.replace(VerifierLoad(), **load), placed)


def drafter(worker_id: str, *, tokenizer: str = "t", sessions: int = 0, placed: int = 0) -> DrafterCandidate:
    return DrafterCandidate(worker_id, 1, tokenizer, DrafterLoad(sessions=sessions), placed)


def test_the_least_busy_verifier_is_chosen_waiting_before_running_before_kv() -> None:
    assert choose_verifier([verifier("a", waiting=1), verifier("b", running=9)], "m") == "b"
    assert choose_verifier([verifier("a", running=3), verifier("b", running=2, kv_usage=0.9)], "m") == "b"
    assert choose_verifier([verifier("a", kv_usage=0.5), verifier("b", kv_usage=0.4)], "m") == "b"


def test_sessions_placed_since_the_last_report_count() -> None:
    assert choose_verifier([verifier("a", placed=4, running=1), verifier("b", running=2)], "m") == "b"
    assert choose_drafter([drafter("a", placed=3), drafter("b", sessions=2)], "t") == "b"


def test_only_verifiers_of_the_model_are_chosen() -> None:
    candidates = [verifier("a", model="other"), verifier("b", running=50)]
    assert choose_verifier(candidates, "m") == "b"
    assert choose_verifier(candidates, "third") is None


def test_only_drafters_of_the_tokenizer_that_did_not_give_up_are_chosen() -> None:
    candidates = [drafter("a", tokenizer="other"), drafter("b", sessions=1), drafter("c", sessions=2)]
    assert choose_drafter(candidates, "t") == "b"
    assert choose_drafter(candidates, "t", frozenset({("b", 1)})) == "c"
    assert choose_drafter(candidates, "t", frozenset({("b", 2)})) == "b"  # it was restarted since
    assert choose_drafter(candidates, "t", frozenset({("b", 1), ("c", 1)})) is None
    assert choose_drafter([], "t") is None


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_the_choice_does_not_depend_on_the_order(sessions: list[int], shuffler: random.Random) -> None:
    verifiers = [verifier(f"w{index}", running=count) for index, count in enumerate(sessions)]
    drafters = [drafter(f"w{index}", sessions=count) for index, count in enumerate(sessions)]
    expected = f"w{sessions.index(min(sessions))}"
    shuffler.shuffle(verifiers)
    shuffler.shuffle(drafters)
    assert choose_verifier(verifiers, "m") == expected
    assert choose_drafter(drafters, "t") == expected
