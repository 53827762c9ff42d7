"""The few tokens that are looked at: the winner is among them, whatever the logits, temperature and seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.sampling.noise import gumbel, row_key
from outrider.sampling.noisy_argmax import SPREAD, NoisyArgmax, noisy_argmax, row_keys
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row, draw
from outrider.sampling.shaping import shape

SEEDS = st.integers(0, 2**64 - 1)


def plain(logits: torch.Tensor, temperature: torch.Tensor, keys: list[int]) -> list[int]:
    """The formula as it is written."""
    shaped = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    found: list[int] = (shaped + gumbel(keys, logits.shape[1])).argmax(-1).tolist()
    return found


def fast(logits: torch.Tensor, temperature: torch.Tensor, keys: list[int]) -> list[int]:
    array = np.array(keys, dtype=np.uint64)
    found: list[int] = noisy_argmax(logits.numpy(), temperature.numpy(), array).tolist()
    return found


@given(st.lists(st.tuples(SEEDS, st.integers(0, 2**31)), max_size=20))
def test_keys_of_many_rows_are_those_of_each(rows: list[tuple[int, int]]) -> None:
    found = row_keys([seed for seed, _ in rows], [position for _, position in rows])
    assert found.tolist() == [row_key(seed, position) for seed, position in rows]


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**31),
    vocab=st.sampled_from([1, 2, 5, 199, 1000, 4096, 33_000]),
    scale=st.sampled_from([0.0, 1e-6, 0.1, 1.0, 4.0, 12.0, 300.0, 1e30]),
    temperature=st.sampled_from([1e-30, 1e-6, 0.01, 0.3, 0.8, 1.0, 2.0, 100.0]),
    steps=st.sampled_from([0.0, 0.5, 8.0]),
    ruled_out=st.sampled_from([0.0, 0.5, 0.99]),
)
def test_the_winner_is_that_of_the_plain_formula(
    seed: int, vocab: int, scale: float, temperature: float, steps: float, ruled_out: float
) -> None:
    """`steps`: to which logits are rounded, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    rows = 3 if vocab > 10_000 else 40
    logits = torch.randn(rows, vocab, generator=generator) * scale
    if steps:
        logits = (logits / steps).round() * steps
    logits[torch.rand(rows, vocab, generator=generator) < ruled_out] = -torch.inf
    logits[:, -1] = 0.0
    temperatures = temperature * torch.rand(rows, generator=generator).add(0.5)
    keys = [row_key(seed, position) for position in range(rows)]
    assert fast(logits, temperatures, keys) == plain(logits, temperatures, keys)


@pytest.mark.parametrize("temperature", [1e-30, 1e-7, 0.01, 0.8, 100.0])
def test_few_tokens_are_looked_at_whatever_the_temperature(temperature: float) -> None:
    """All of them were, near 0: that made such a row five times as dear as others."""
    logits = torch.randn(4, 33_000, generator=torch.Generator().manual_seed(1)).numpy() * 3
    draws = NoisyArgmax(logits, np.full(4, temperature, np.float32), row_keys(range(4), range(4)))
    places, _ = draws._contenders(np.arange(4))
    assert len(places) < 0.02 * logits.size


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("behind", [SPREAD * 0.99, SPREAD * 1.001, SPREAD * 1.5, 12.0])
def test_a_rare_token_wins_by_a_hair(seed: int, behind: float) -> None:
    """The largest number of a million, for a token that is just so much less likely that it is close."""
    keys = [row_key(seed, 0)]
    noise = gumbel(keys, 2**20)[0]
    best = int(noise.argmax())
    likeliest = int((noise - (noise[best] - behind)).abs().argmin())
    lead = noise[best] - noise[likeliest]
    winners = set()
    for times in (1 - 1e-5, 1 - 1e-6, 1.0, 1 + 1e-6, 1 + 1e-5):
        logits = torch.full((1, 2**20), -40.0)
        logits[0, best], logits[0, likeliest] = -lead * times, 0.0
        found = fast(logits, torch.ones(1), keys)
        assert found == plain(logits, torch.ones(1), keys)
        winners |= set(found)
    assert winners == {best, likeliest}


def test_of_equals_the_lowest_id_wins() -> None:
    keys = [row_key(7, position) for position in range(400)]
    noise = gumbel(keys, 2)
    logits = torch.zeros(400, 2)
    lower = noise.argmin(1, keepdim=True)
    logits.scatter_(1, 1 - lower, noise.gather(1, lower) - noise.gather(1, 1 - lower))
    equal = (logits + noise)[:, 0] == (logits + noise)[:, 1]
    assert equal.sum() > 100
    assert fast(logits, torch.ones(400), keys) == plain(logits, torch.ones(400), keys)


@pytest.mark.parametrize("fill", [torch.nan, -torch.inf, torch.inf])
def test_rows_without_a_distribution_do_as_the_plain_formula_does(fill: float) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    logits[0] = fill
    logits[1, 20] = fill
    logits[2, [30, 10]] = fill
    keys = [row_key(1, position) for position in range(4)]
    assert fast(logits, torch.ones(4), keys) == plain(logits, torch.ones(4), keys)


@pytest.mark.parametrize("at_once", [1, 64, 1000])
def test_how_many_are_computed_at_once_changes_nothing(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    logits = torch.randn(30, 199, generator=torch.Generator().manual_seed(2)) * 3
    keys = [row_key(5, position) for position in range(30)]
    monkeypatch.setattr("outrider.sampling.noisy_argmax.ELEMENTS_AT_ONCE", at_once)
    assert fast(logits, torch.ones(30), keys) == plain(logits, torch.ones(30), keys)


@settings(max_examples=60)
@given(
    kinds=st.lists(
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 0.8, 1.0, 1e-40]),
            top_k=st.sampled_from([0, 0, 3]),
            top_p=st.sampled_from([1.0, 1.0, 0.5]),
            min_p=st.sampled_from([0.0, 0.0, 0.1]),
            seed=SEEDS,
        ),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 2**31),
    vocab_size=st.sampled_from([None, 150]),
)
def test_draws_are_those_of_the_plain_formula(
    kinds: list[SamplingParams], seed: int, vocab_size: int | None
) -> None:
    rows = [Row(params, seed + index, None, ()) for index, params in enumerate(kinds * 4)]
    logits = (torch.randn(len(rows), 199, generator=torch.Generator().manual_seed(seed)) * 4).round()
    expected = []
    for row, own in zip(rows, logits[:, :vocab_size].split(1), strict=True):
        if not row.params.greedy:
            own = shape(own, [row]) + gumbel([row_key(row.params.seed, row.position)], own.shape[1])
        expected.append(int(own.argmax(-1)))
    assert draw(logits, rows, vocab_size).tolist() == expected


@pytest.mark.parametrize("fill", [torch.nan, -torch.inf, torch.inf, 9.0])
def test_greedy_takes_the_first_of_equals_and_of_what_is_no_number(fill: float) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    logits[0], logits[1, [40, 8]] = fill, fill
    rows = [Row(SamplingParams(temperature=0.0), position, None, ()) for position in range(3)]
    assert draw(logits, rows).tolist() == logits.argmax(-1).tolist()
