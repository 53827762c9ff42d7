"""The arithmetic of k and the window."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.speculation import (
    FIRST_ACCEPTANCE,
    FORGETTING,
    MARGIN,
    MAX_WINDOW,
    MOST_PAIRS,
    PROBE_TOKENS,
    Estimator,
    PairAcceptance,
    Pairs,
    choose_k,
    settled,
    window,
    worth_sending,
)

CAP = 8
steps = st.lists(st.integers(1, 8).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), max_size=60)
priors = st.floats(0, 1)
prices = st.floats(0, 30)


def observed(prior: float, history: list[tuple[int, int]]) -> Estimator:
    estimator = Estimator(prior)
    for accepted, verified in history:
        estimator.observe(accepted, verified, accepted + 1)
    return estimator


@given(priors, steps)
def test_acceptance_is_a_chance_and_never_certain(prior: float, history: list[tuple[int, int]]) -> None:
    assert 0 < observed(prior, history).acceptance < 1


@given(priors, steps, st.sampled_from([0.0, -1.0, math.nan]), st.integers(0, 12))
def test_a_price_of_zero_gives_the_cap(
    prior: float, history: list[tuple[int, int]], price: float, cap: int
) -> None:
    assert choose_k(observed(prior, history), price, cap) == cap


@given(priors, steps, prices, prices, st.integers(0, 12))
def test_k_is_within_the_cap_and_never_rises_with_the_price(
    prior: float, history: list[tuple[int, int]], one: float, other: float, cap: int
) -> None:
    estimator = observed(prior, history)
    cheap, dear = sorted((one, other))
    assert 0 <= choose_k(estimator, dear, cap) <= choose_k(estimator, cheap, cap) <= cap


@given(priors, steps, st.floats(0.01, 0.99 / MARGIN))
def test_k_is_the_deepest_token_that_may_be_worth_the_price(
    prior: float, history: list[tuple[int, int]], price: float
) -> None:
    estimator = observed(prior, history)
    k, least = choose_k(estimator, price, CAP), MARGIN * price
    assert estimator.acceptance**k >= least * (1 - 1e-9)
    assert k == CAP or estimator.acceptance ** (k + 1) < least * (1 + 1e-9)


@pytest.mark.parametrize("price", [1 / MARGIN, 2 / MARGIN, math.inf])
def test_a_price_that_nothing_is_worth_gives_0(price: float) -> None:
    assert choose_k(Estimator(1.0), price, CAP) == 0


def test_the_prior_weighs_as_much_as_two_tokens() -> None:
    assert Estimator(0.7).acceptance == pytest.approx(0.7)
    # After one token that was accepted: (.7 * 2 + 1) / 3.
    assert observed(0.7, [(1, 1)]).acceptance == pytest.approx(0.8)


def test_what_is_forgotten_is_the_session_and_not_its_prior() -> None:
    estimator = observed(0.5, [(0, 1)] * 2000)
    assert estimator.acceptance == pytest.approx(1 / (2 + 1 / (1 - FORGETTING)), rel=0.01)


def test_the_failure_behind_a_rejection_is_the_only_one_counted() -> None:
    estimator = observed(0.5, [(2, 8)])
    assert (estimator.accepted, estimator.observed) == (2, 3)
    everything = observed(0.5, [(8, 8)])
    assert (everything.accepted, everything.observed) == (8, 8)


def test_accepted_drafts_raise_k() -> None:
    estimator = Estimator()
    price = 1.0
    before = choose_k(estimator, price, CAP)
    for _ in range(20):
        estimator.observe(4, 4, 5)
    assert before < choose_k(estimator, price, CAP) == CAP


def test_hostile_drafts_at_a_price_end_in_k_0_which_recovers_by_probing() -> None:
    estimator, price = Estimator(), 0.6
    for _ in range(30):
        estimator.observe(0, 4, 1)
    assert choose_k(estimator, price, CAP) == 0
    # Nothing is verified now, so nothing is learnt, until a probe is due.
    for _ in range(PROBE_TOKENS - 1):
        estimator.observe(0, 0, 1)
        assert choose_k(estimator, price, CAP) == 0
    estimator.observe(0, 0, 1)
    assert choose_k(estimator, price, CAP) == 1
    # The drafts are good again: probes find it out within a few rounds.
    probes = 0
    while choose_k(estimator, price, CAP) < 2:
        k = choose_k(estimator, price, CAP)
        estimator.observe(k, k, k + 1)
        probes += k
        assert probes < 10
    for _ in range(20):
        k = choose_k(estimator, price, CAP)
        estimator.observe(k, k, k + 1)
    assert choose_k(estimator, price, CAP) == CAP


def test_a_probe_that_fails_ends_the_probing_until_the_next_is_due() -> None:
    estimator = observed(0.5, [(0, 4)] * 30)
    estimator.observe(0, 0, PROBE_TOKENS)
    assert choose_k(estimator, 0.6, CAP) == 1
    estimator.observe(0, 1, 1)
    assert choose_k(estimator, 0.6, CAP) == 0


def test_no_probe_where_the_request_switched_speculation_off() -> None:
    estimator = observed(0.5, [(0, 4)] * 30)
    estimator.observe(0, 0, 10 * PROBE_TOKENS)
    assert choose_k(estimator, 0.6, 0) == 0


def test_a_change_is_followed_faster_than_by_a_plain_average() -> None:
    estimator = Estimator()
    for _ in range(100):
        estimator.observe(4, 4, 5)
    for _ in range(24):
        estimator.observe(0, 4, 1)
    assert estimator.acceptance < 0.4 < 0.9 < estimator.accepted / estimator.observed


@given(st.floats(0.05, 0.95), st.integers(0, 2**32))
def test_it_tends_to_a_steady_acceptance(rate: float, seed: int) -> None:
    draws = random.Random(seed)
    estimator = Estimator()
    mean = 0.0
    for step in range(600):
        accepted = next((n for n in range(4) if draws.random() >= rate), 4)
        estimator.observe(accepted, 4, accepted + 1)
        if step >= 300:
            mean += estimator.acceptance / 300
    assert math.isclose(mean, rate, abs_tol=0.12)


def test_a_pair_learns_the_mean_of_its_sessions() -> None:
    pair = PairAcceptance()
    for session in range(400):
        pair.absorb(95 if session % 2 else 65, 100)
    assert pair.mean == pytest.approx(0.8, abs=0.02)


def test_a_pair_ignores_sessions_that_are_too_short_to_say_anything() -> None:
    pair = PairAcceptance()
    pair.absorb(0, 7)
    assert (pair.mean, pair.sessions) == (FIRST_ACCEPTANCE, 0)


def test_what_the_verifier_guessed_itself_moves_k_and_says_nothing_of_the_pair() -> None:
    drafted, own = Estimator(0.5), Estimator(0.5)
    drafted.observe(8, 8, 9)
    own.observe(8, 8, 9, own=True)
    assert own.acceptance == drafted.acceptance
    assert (own.accepted, own.observed, drafted.accepted) == (0, 0, 8)


def test_the_window_covers_the_wait_for_the_verdict() -> None:
    # 4 + ceil((13 + 20) / 3) = 15 tokens, less than the 5 * (2 + 2) of the steps in flight
    assert window(4, 0.013, 0.020, 0.003) == 15


def test_a_fast_drafter_does_not_run_ahead_of_what_steps_could_verify() -> None:
    # 4 + ceil(83 / 1.5) = 60, but three steps of k + 1 tokens are all that can use them
    assert window(4, 0.082, 0.001, 0.0015) == 15


def test_the_window_is_two_steps_where_nothing_is_measured_yet_and_none_without_k() -> None:
    assert window(4, 0.0, 0.0, 0.0) == 10
    assert window(4, 0.05, 0.0, 0.0) == 10
    assert window(0, 0.05, 0.01, 0.001) == 0


reported = st.floats()  # by workers: anything, NaN included


@given(st.integers(0, 1024), reported, reported, reported)
def test_the_window_holds_k_and_is_bounded(k: int, step: float, trip: float, token: float) -> None:
    ahead = window(k, step, trip, token)
    assert ahead == 0 if k == 0 else k <= ahead <= max(2 * (k + 1), MAX_WINDOW)


def test_small_moves_of_the_window_are_not_worth_a_message() -> None:
    assert not worth_sending(16, 16)
    assert not worth_sending(16, 19)
    assert worth_sending(16, 21)
    assert worth_sending(16, 0)
    assert worth_sending(0, 1)


def test_k_is_raised_at_once_and_lowered_only_by_half() -> None:
    assert settled(4, 5) == 5
    assert settled(0, 1) == 1
    assert settled(8, 7) == settled(8, 5) == 8
    assert settled(8, 4) == 4
    assert settled(1, 0) == 0


@given(st.integers(0, 16), st.integers(0, 16))
def test_a_settled_k_is_never_under_the_wanted_one_and_stays(current: int, wanted: int) -> None:
    k = settled(current, wanted)
    assert k in (current, wanted) and k >= wanted
    assert settled(k, wanted) == k


def test_a_price_that_jitters_sends_few_messages() -> None:
    draws = random.Random(1)
    estimator = observed(FIRST_ACCEPTANCE, [(3, 4), (1, 4), (4, 4), (2, 4)] * 10)
    wanted = [choose_k(estimator, price=draws.uniform(0.6, 0.9), cap=CAP) for _ in range(500)]
    k, sent = CAP, 0
    for each in wanted:
        sent += settled(k, each) != k
        k = settled(k, each)
    moves = sum(a != b for a, b in pairwise(wanted))
    assert sent < moves / 4


def test_drafters_of_ever_other_models_leave_no_more_pairs_than_are_kept() -> None:
    """A drafter says what its model is, and may say another thing twice a second."""
    pairs = Pairs()
    honest = pairs.of("target", "draft")
    honest.mean = 0.9
    for number in range(2 * MOST_PAIRS):
        pairs.of("target", f"made up {number}")
        assert pairs.of("target", "draft") is honest
    assert len(pairs._of) == MOST_PAIRS


def test_what_one_owner_shows_of_a_pair_is_outweighed_by_anothers_own_sessions_at_once() -> None:
    pairs = Pairs()
    for _ in range(1000):
        pairs.of("target", "draft", "one").absorb(0, 100)
    other = pairs.of("target", "draft", "other")
    assert other.mean == pairs.of("target", "draft").mean < 0.01
    for _ in range(5):
        pairs.of("target", "draft", "other").absorb(80, 100)
    assert pairs.of("target", "draft", "other").mean > 0.4 and pairs.of("target", "draft", "one").mean < 0.01
