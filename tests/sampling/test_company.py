"""Nobody's parameters change another's tokens, nor what they cost: over the whole range of all of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.sampling import plain_draws
from outrider.sampling.cuts import beyond_mass, kth_largest
from outrider.sampling.how import How, how
from outrider.sampling.params import BIASES, MAX_BIASES, RANGES, SamplingParams
from outrider.sampling.sampler import Row, TokenCounts, draw, rank
from outrider.sampling.shaping import _cut_on_cpu, _cut_on_device, change, shape
from outrider.sampling.waves import NOT_DRAWN
from tests.sampling.ranks import chosen

VOCABS = (1, 2, 7, 199, 1000)
ODD = (0.0, -0.0, 5e-324, 1e-310, 2.0**-149, 1e-38, 1e-30, 1e-7, 1.0, math.nextafter(1.0, 0.0))


def legal(name: str, *usual: float) -> st.SearchStrategy[Any]:
    """A parameter's whole range, its ends and odd numbers in it, and what is usual, more often."""
    allowed = RANGES[name]
    ends = [value for value in (allowed.low, allowed.high, *ODD) if value in allowed]
    drawn = st.floats(allowed.low, allowed.high, exclude_min=allowed.above)
    return st.sampled_from([*usual, *usual, *usual]) | st.sampled_from(ends) | drawn


PARAMS = st.builds(
    SamplingParams,
    temperature=legal("temperature", 0.0, 0.8, 1.0),
    top_k=st.sampled_from([0, 0, 0, 1, 3, 198, 199, 200, 2**31 - 1]),
    top_p=legal("top_p", 1.0, 0.9),
    min_p=legal("min_p", 0.0, 0.05),
    presence_penalty=legal("presence_penalty", 0.0),
    frequency_penalty=legal("frequency_penalty", 0.0),
    repetition_penalty=legal("repetition_penalty", 1.0),
    logit_bias=st.just({})
    | st.dictionaries(st.integers(0, 1200), st.floats(BIASES.low, BIASES.high, width=32), max_size=4)
    | st.just({token: -100.0 + token % 7 for token in range(MAX_BIASES)}),
    seed=st.sampled_from([0, 1, 2**64 - 1]) | st.integers(0, 2**64 - 1),
)

SCALES = (0.0, 1e-45, 1e-38, 1e-3, 1.0, 4.0, 300.0, 1e30, 3e38)
FILLS = (None, None, None, -math.inf, math.inf, math.nan, 3.4e38, -3.4e38)


@st.composite
def batches(draws: Callable[..., Any]) -> tuple[torch.Tensor, list[Row]]:
    """Rows with logits of all kinds: ties, infinities, what is no number, denormals; sessions with drafts."""
    seed, vocab = draws(st.integers(0, 2**31)), draws(st.sampled_from(VOCABS))
    generator = torch.Generator().manual_seed(seed)
    logits, rows = [], list[Row]()
    for params in draws(st.lists(PARAMS, min_size=1, max_size=7)):
        scale, fill = draws(st.sampled_from(SCALES)), draws(st.sampled_from(FILLS))
        history = TokenCounts(*(torch.randint(0, 1000, (n,), generator=generator).tolist() for n in (9, 5)))
        drafted: list[int] = []
        for depth in range(draws(st.integers(0, 3)) + 1):
            own = torch.randn(vocab, generator=generator) * scale
            if draws(st.booleans()):
                own = own.round()  # ties
            if fill is not None:
                own[torch.rand(vocab, generator=generator) < draws(st.sampled_from([0.1, 1.0]))] = fill
            logits.append(own)
            rows.append(Row(params, seed + depth, history, tuple(drafted), drafted[-1] if drafted else None))
            drafted.append(int(torch.randint(0, 3, (1,), generator=generator)))
    return torch.stack(logits), rows


def alone(logits: torch.Tensor, rows: Sequence[Row], vocab_size: int | None = None) -> list[int]:
    return [int(draw(own[None], [row], vocab_size)) for own, row in zip(logits, rows, strict=True)]


@settings(max_examples=80, deadline=None)
@given(batches(), st.randoms(use_true_random=False))
def test_a_row_s_token_is_the_same_in_any_company(batch: tuple[torch.Tensor, list[Row]], rng: Any) -> None:
    logits, rows = batch
    before = logits.clone()
    expected = alone(logits, rows)
    plain = [row._replace(after=None) for row in rows]
    assert draw(logits, plain).tolist() == expected
    order = list(range(len(rows)))
    rng.shuffle(order)
    some = order[: rng.randint(1, len(order))] * 2  # and beside itself
    assert draw(logits[some], [plain[index] for index in some]).tolist() == [expected[i] for i in some]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.sampling.noisy_argmax.ELEMENTS_AT_ONCE", 1)  # in waves
        found = draw(logits, rows).tolist()
    needed = True
    for index, row in enumerate(rows):
        needed = row.after is None or (needed and expected[index - 1] == row.after)
        assert found[index] == expected[index] or (found[index] == NOT_DRAWN and not needed)
    assert all(0 <= token < logits.shape[1] for token in expected)
    assert torch.equal(logits.nan_to_num(7e7), before.nan_to_num(7e7)), "the logits were changed"


@settings(max_examples=40, deadline=None)
@given(batches())
def test_what_a_drafter_ranks_is_the_same_in_any_company(batch: tuple[torch.Tensor, list[Row]]) -> None:
    logits, rows = batch
    together = rank(logits, rows, 3)
    for own, row, found in zip(logits, rows, together, strict=True):
        assert str(rank(own[None], [row], 3)) == str([found])  # NaN is not equal to itself
        if own.isfinite().all() and len(set(found.shares)) == len(found.shares):
            assert found.ids[0] == int(draw(own[None], [row]))


@settings(max_examples=40, deadline=None)
@given(batches(), st.sampled_from([2, 3]))
def test_slices_of_the_vocabulary_give_what_the_whole_gives(
    batch: tuple[torch.Tensor, list[Row]], size: int
) -> None:
    """As a group of ranks does it: from slices if that is enough, else from all at the leader."""
    logits, rows = batch
    expected = alone(logits, rows)
    for found in chosen(logits, rows, size, logits.shape[1]):
        for index, row in enumerate(rows):
            assert how(row.params) is How.WHOLE or found[index] == expected[index]


@settings(max_examples=50, deadline=None)
@given(batches())
def test_logits_stay_finite_after_every_step(batch: tuple[torch.Tensor, list[Row]]) -> None:
    logits, rows = batch
    changed = logits.nan_to_num()
    change(changed, rows)
    assert changed.isfinite().all()
    shaped = shape(changed, rows)
    kept = shaped[shaped != -math.inf]
    assert kept.isfinite().all() and (kept <= 0).all()
    assert (shaped.amax(1) == 0).all(), "the likeliest is never ruled out"


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from(SCALES),
    st.sampled_from([0.0, 0.5, 8.0]),
    st.sampled_from([1e-6, 0.3, 0.9, 0.999, math.nextafter(1.0, 0.0)]),
)
def test_cuts_without_a_sort_keep_what_a_sort_keeps(
    seed: int, scale: float, steps: float, top_p: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 3000, generator=generator) * min(scale, 1e30)
    logits = (logits / steps).round() * steps if steps else logits
    log_p = logits - logits.amax()
    row = log_p[0].numpy()
    for k in (1, 2, 57, 2999, 3000):
        assert kth_largest(row, k) == np.sort(row)[-k]
    params = SamplingParams(top_p=top_p)
    kept = _cut_on_cpu(log_p.clone(), params).isfinite()
    sorted_kept = _cut_on_device(log_p.clone(), params).isfinite()
    # Sums in another order: by one token, or by such as have no mass that counts.
    unlike, mass = kept != sorted_kept, log_p.double().softmax(-1)
    assert unlike.sum() <= 1 or (mass * unlike).sum() < 1e-12
    assert not beyond_mass(row, top_p).all()


def calls(run: Callable[[], object]) -> int:
    """How many functions Python calls, its own and others': what a step costs but for array arithmetic."""
    count = 0

    def profile(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    run()  # what is made once
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


HISTORY = TokenCounts(range(10))
LONG = TokenCounts(range(3000), range(3000))
MOST: dict[str, tuple[Row, Row]] = {  # little of something, and the most of it
    "logit_bias": (
        Row(SamplingParams(logit_bias={1: 1.0}), 5, None, ()),
        Row(SamplingParams(logit_bias=dict.fromkeys(range(MAX_BIASES), 1.0)), 5, None, ()),
    ),
    "a long text under penalties": (
        Row(SamplingParams(repetition_penalty=1.1), 5, HISTORY, (1, 2)),
        Row(SamplingParams(repetition_penalty=1.1), 5, LONG, (1, 2)),
    ),
    "top_k": (Row(SamplingParams(top_k=1), 5, None, ()), Row(SamplingParams(top_k=3000), 5, None, ())),
    "top_p": (Row(SamplingParams(top_p=0.1), 5, None, ()), Row(SamplingParams(top_p=0.999), 5, None, ())),
    "temperature": (
        Row(SamplingParams(top_p=0.9), 5, None, ()),
        Row(SamplingParams(temperature=100, top_p=0.9), 5, None, ()),
    ),
}


@pytest.mark.parametrize("name", MOST)
@pytest.mark.parametrize("function", [draw, lambda logits, rows: rank(logits, rows, 3)])
def test_the_most_of_a_parameter_takes_no_more_steps_of_python_than_a_little(
    name: str, function: Callable[..., object]
) -> None:
    logits = torch.randn(1, 4096, generator=torch.Generator().manual_seed(1))
    little, most = (calls(lambda row=row: function(logits, [row])) for row in MOST[name])  # type: ignore[misc]
    assert most <= little + 20


def test_only_rows_that_ask_for_it_are_shaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever one asks for, the others' logits are neither copied for it, nor changed, sorted or divided."""
    seen: list[tuple[str, int]] = []
    for step in ("change", "shape"):
        plain = getattr(plain_draws, step)
        monkeypatch.setattr(
            plain_draws,
            step,
            lambda logits, rows, step=step, plain=plain: (
                seen.append((step, len(logits))),
                plain(logits, rows),
            )[1],
        )
    logits = torch.randn(64, 199, generator=torch.Generator().manual_seed(1))
    for ordinary in (SamplingParams(), SamplingParams(temperature=0.0)):
        for odd in (SamplingParams(top_k=198), SamplingParams(top_p=0.9), SamplingParams(min_p=0.1)):
            rows = [Row(replace(ordinary, seed=index), 3, None, ()) for index in range(63)]
            draw(logits, [*rows, Row(odd, 3, None, ())])
    assert set(seen) == {("change", 1), ("shape", 1)}


def test_a_session_s_arrays_are_made_once() -> None:
    params = SamplingParams(logit_bias={3: 1.0, 5: -2.0})
    assert params.biases.ids is params.biases.ids and list(params.biases.ids) == [3, 5]
    assert params.biases.added is params.biases.added and list(params.biases.added) == [1.0, -2.0]
