"""The price of a token, and what it is computed from."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from outrider.engine.loading import load_engine
from tests.tiny_models import build
from verifier.meter import Meter
from verifier.price import StepTime
from verifier.profile import TOKENS, profile


def test_between_points_time_is_on_the_line_and_beyond_them_on_the_last_one() -> None:
    step_time = StepTime.measured({1: 0.010, 5: 0.010, 9: 0.018})
    assert [step_time.at(n) for n in (0, 1, 3, 5)] == [0.010] * 4
    assert step_time.at(7) == pytest.approx(0.014)
    assert step_time.at(17) == pytest.approx(0.034)


def test_a_time_that_falls_is_jitter() -> None:
    assert StepTime.measured({1: 0.012, 2: 0.010, 4: 0.020}).at(2) == 0.012


def test_one_point_is_enough() -> None:
    assert StepTime.measured({4: 0.01}).at(100) == 0.01


def test_where_a_token_takes_no_time_it_costs_nothing() -> None:
    assert StepTime.measured({1: 0.01, 64: 0.01}).price(goodput=1000, tokens=8) == 0


def test_the_price_is_goodput_times_slope() -> None:
    step_time = StepTime.measured({1: 0.010, 101: 0.110})  # a millisecond a token
    assert step_time.price(goodput=200, tokens=1) == pytest.approx(0.2)
    assert step_time.price(goodput=5000, tokens=1) == 1  # it never costs more than what it can bring


def test_plain_decoding_at_saturation_costs_a_token_for_a_token() -> None:
    step_time = StepTime.measured({8: 0.008, 64: 0.064})
    meter = Meter(step_time)
    meter.observe(seconds=0.032, tokens=32, committed=32, starved=None)
    assert meter.price == pytest.approx(1)


def test_what_steps_take_corrects_the_profile() -> None:
    step_time = StepTime.measured({1: 0.01, 64: 0.02})
    for _ in range(100):
        step_time.observe(10, 3 * StepTime.measured({1: 0.01, 64: 0.02}).at(10))
    assert step_time.correction == pytest.approx(3, rel=1e-3)
    assert step_time.at(64) == pytest.approx(0.06, rel=1e-3)


def test_before_any_step_there_is_no_price() -> None:
    assert Meter(StepTime.measured({1: 0.01, 64: 0.1})).price == 0
    assert Meter().price == 0


def test_starvation_counts_only_steps_in_which_drafts_were_wanted() -> None:
    meter = Meter()
    for starved in (None, 1.0, None, None):
        meter.observe(0.01, 1, 1, starved)
    once = meter.starvation
    meter.observe(0.01, 1, 1, 1.0)
    assert 0 < once < meter.starvation < 1


def test_the_profile_runs_every_size_and_leaves_the_pool_as_it_was(tmp_path: Path) -> None:
    engine = load_engine(str(build("llama", tmp_path / "target")), threads=1, kv_memory_bytes=2**24)
    ticks = itertools.count()
    shares: list[float] = []
    step_time = profile(engine, lambda: next(ticks), shares.append)
    assert [tokens for tokens, _ in step_time.profile] == list(TOKENS)
    assert {seconds for _, seconds in step_time.profile} == {1}  # two looks at the clock for each step
    assert shares[0] == 0 and shares[-1] == 1 and shares == sorted(shares)
    assert engine.pool.usage == 0
