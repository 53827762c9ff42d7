"""The price of a token, and what it is computed from."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest

from outrider.engine.loading import load_engine
from tests.tiny_models import build
from verifier.meter import LEAST_READING, Meter
from verifier.price import StepTime
from verifier.profile import TOKENS, profile, remembered


def test_between_points_time_is_on_the_line_and_beyond_them_on_the_last_one() -> None:
    step_time = StepTime.measured({1: 0.010, 5: 0.010, 9: 0.018})
    assert [step_time.at(n) for n in (0, 1, 3, 5)] == [0.010] * 4
    assert step_time.at(7) == pytest.approx(0.014)
    assert step_time.at(17) == pytest.approx(0.034)
    assert [step_time.at(n) for n in range(20)] == pytest.approx(step_time.times(np.arange(20)).tolist())


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
    assert step_time.at(10) == pytest.approx(3 * StepTime.measured({1: 0.01, 64: 0.02}).at(10), rel=1e-3)
    assert step_time.at(64) == pytest.approx(0.06, rel=1e-3)


def test_each_size_is_corrected_on_its_own() -> None:
    """Its profile is right about small steps and wrong about large ones."""
    step_time = StepTime.measured({1: 0.01, 8: 0.01, 64: 0.02, 128: 0.04})
    for _ in range(300):
        step_time.observe(4, 0.01)
        step_time.observe(64, 0.04)
    assert step_time.at(4) == pytest.approx(0.01, rel=0.03)
    assert step_time.at(64) == pytest.approx(0.04, rel=0.03)


def test_a_single_slow_step_is_hardly_believed() -> None:
    step_time = StepTime.measured({1: 0.01, 64: 0.02})
    step_time.observe(1, 100.0)
    assert step_time.at(1) < 0.011


def test_time_never_falls_with_more_tokens() -> None:
    step_time = StepTime.measured({1: 0.01, 8: 0.011, 64: 0.02})
    for _ in range(100):
        step_time.observe(1, 0.05)
        step_time.observe(8, 0.01)
    assert step_time.at(1) <= step_time.at(4) <= step_time.at(8)
    assert step_time.slope(1) >= 0


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
    step_time = profile(engine, lambda: 0.1 * next(ticks), shares.append, most_tokens=100)
    assert step_time.tokens.tolist() == [tokens for tokens in TOKENS if tokens <= 64]
    assert step_time.profile == pytest.approx(0.1)  # two looks at the clock for each step
    assert shares[0] == 0 and shares[-1] == 1 and shares == sorted(shares)
    assert engine.pool.usage == 0


def test_a_size_that_takes_long_is_the_last_one(tmp_path: Path) -> None:
    engine = load_engine(str(build("llama", tmp_path / "target")), threads=1, kv_memory_bytes=2**24)
    ticks = itertools.count()
    assert profile(engine, lambda: next(ticks), lambda _: None).tokens.tolist() == [1]


def test_the_profile_is_made_once_for_a_model_and_a_machine(tmp_path: Path) -> None:
    times = iter([0.01, 0.02, 0.03, 0.04, 0.05])
    folder = tmp_path / "cache"

    def ask(**what: object) -> float:
        found = remembered(folder, what, lambda: StepTime.measured({1: next(times), 8: 0.5}))
        return found.at(1)

    assert [ask(model="a"), ask(model="b"), ask(model="a"), ask(model="a", threads=2)] == [
        0.01,
        0.02,
        0.01,
        0.03,
    ]
    assert len(list(folder.iterdir())) == 3
    assert remembered(None, {"model": "a"}, lambda: StepTime.measured({1: 7.0})).at(1) == 7.0
    for path in folder.iterdir():
        path.write_text(path.read_text().replace("0.01", "-1"))
    assert ask(model="a") == 0.04


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{}",
        "[1]",
        '{"about": {}, "seconds": {"1": 0.5}}',
        '{"about": ABOUT, "seconds": {}}',
        '{"about": ABOUT, "seconds": {"1": NaN}}',
        '{"about": ABOUT, "seconds": {"0": 0.5}}',
        '{"about": ABOUT, "seconds": {"x": 0.5}}',
        '{"about": ABOUT, "seconds": [1]}',
        "[" * 10**6,
    ],
)
def test_a_damaged_or_foreign_profile_counts_as_none(tmp_path: Path, damage: str) -> None:
    remembered(tmp_path, {}, lambda: StepTime.measured({1: 0.01}))
    (path,) = tmp_path.iterdir()
    about = json.dumps(json.loads(path.read_text())["about"])
    path.write_text(damage.replace("ABOUT", about))
    assert remembered(tmp_path, {}, lambda: StepTime.measured({1: 0.02})).at(1) == 0.02
    assert remembered(tmp_path, {}, lambda: StepTime.measured({1: 0.03})).at(1) == 0.02  # it was mended


def test_a_folder_that_cannot_be_written_is_no_reason_not_to_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert remembered(tmp_path / "file", {}, lambda: StepTime.measured({1: 0.02})).at(1) == 0.02


def test_goodput_counts_the_waits() -> None:
    meter = Meter()
    meter.observe(seconds=0.03, tokens=5, committed=4, starved=None, waited=0.01)
    assert meter.goodput == pytest.approx(100)
    assert meter.step_seconds == 0.03


def test_drafts_cost_what_they_all_took_and_not_what_one_more_would() -> None:
    """Behind the seven drafts of these steps T has a stair, which none of them climbs."""
    meter = Meter(StepTime.measured({1: 0.03, 8: 0.05, 9: 0.08}))
    for _ in range(50):
        meter.observe(seconds=0.05, tokens=8, committed=5, starved=None, drafts=7)
    assert meter.price == 1.0
    assert meter.draft_cost == pytest.approx(meter.goodput * 0.02 / 7, rel=0.05)
    for _ in range(100):  # none come any more
        meter.observe(seconds=0.03, tokens=1, committed=1, starved=None)
    assert meter.draft_cost == meter.price


def test_a_prompt_is_read_beside_others_as_fast_as_they_hardly_notice() -> None:
    """T = 40 ms up to 8 tokens and 2 ms for each further one: 16 tokens make a step 1.8 times as long."""
    meter = Meter(StepTime.measured({1: 0.04, 8: 0.04, 108: 0.24}))
    assert meter.reading(1) == 16
    assert meter.reading(58) == 56
    for _ in range(200):  # and at the end of a long prompt each token takes twice that
        meter.observe_reading(seconds=0.04 + 10 * 0.004, decoding=1, prompt_tokens=10)
    meter.observe(seconds=0.04, tokens=1, committed=1, starved=None)
    assert meter.reading(1) == 8
    meter.observe_reading(seconds=100.0, decoding=1, prompt_tokens=10)  # a hiccup
    assert meter.reading(1) > 6


@pytest.mark.parametrize("slower", [1, 10])
def test_a_machine_that_is_slow_lately_is_not_put_down_to_the_prompts(slower: int) -> None:
    """Where prompts never end, a step in every so many shows what one without takes: so the steps that read
    come to take 1.8 times that, and not as long with next to nothing read."""
    meter = Meter(StepTime.measured({1: 0.01, 8: 0.01, 108: 0.11}))  # 10 ms, and 1 ms for each prompt token
    read = without = 0
    for _ in range(200):
        tokens = meter.reading(4)
        if tokens:
            read += 1
            meter.observe_reading(slower * 0.01 + tokens * 0.001, decoding=4, prompt_tokens=tokens)
        else:
            without += 1
            meter.observe(slower * 0.01, tokens=4, committed=4, starved=None)
    assert (read, without) == (160, 40)
    meter.observe(slower * 0.01, tokens=4, committed=4, starved=None)
    assert meter.reading(4) == pytest.approx(slower * 8, rel=0.1)


def test_however_dear_they_are_some_prompt_tokens_are_read() -> None:
    assert Meter(StepTime.measured({1: 0.001, 2: 1.0})).reading(1) == LEAST_READING


def test_without_a_profile_only_the_limits_bound_what_is_read() -> None:
    assert Meter().reading(1) > 10_000


def test_a_pipe_in_a_profiles_place_is_none(tmp_path: Path) -> None:
    remembered(tmp_path, {}, lambda: StepTime.measured({1: 0.01}))
    (path,) = tmp_path.iterdir()
    path.unlink()
    os.mkfifo(path)
    assert remembered(tmp_path, {}, lambda: StepTime.measured({1: 0.02})).at(1) == 0.02


def test_prompts_that_are_read_alone_hold_up_who_comes_meanwhile_for_a_step_of_some_tenths() -> None:
    meter = Meter(StepTime.measured({1: 0.01, 101: 0.11}))  # 1 ms for each further token
    assert meter.reading_alone() == 190
    for _ in range(200):  # far into a context each takes longer
        meter.observe_reading(seconds=0.01 + 100 * 0.002, decoding=0, prompt_tokens=100)
    assert meter.reading_alone() == pytest.approx(95, abs=1)
    large = Meter(StepTime.measured({1: 0.5, 101: 2.5}))
    assert large.reading_alone() == 100, "else it would hardly read in all the time that a step takes"
    assert Meter().reading_alone() > 10_000
