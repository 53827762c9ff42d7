"""The sampler: right distribution, right order of transforms, rows independent of one another."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row, TokenCounts, draw
from tests.goodness_of_fit import chi_square

SAMPLES = 12_000
VOCAB = 24
PROMPT = [0, 1, 2, 3, 3]
OUTPUT = [2, 4, 4, 5]
DRAFTED = [4, 6]


def analytic(
    logits: npt.NDArray[np.float64], params: SamplingParams, allowed: Sequence[int] = range(VOCAB)
) -> npt.NDArray[np.float64]:
    """p' of one row, token by token in float64, written down a second time from the definitions."""
    x = logits.astype(np.float64).copy()
    output = OUTPUT + DRAFTED
    for token in set(PROMPT + output):
        x[token] = (
            x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        )
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for token, bias in params.logit_bias.items():
        x[token] += bias
    x[[token for token in range(VOCAB) if token not in allowed]] = -np.inf
    x = x / params.temperature
    if params.top_k:
        x[x < sorted(x)[-min(params.top_k, len(x))]] = -np.inf
    p = np.exp(x - x.max())
    p /= p.sum()
    if params.top_p < 1:
        kept, mass = set(), 0.0
        for token in sorted(range(len(p)), key=lambda token: -p[token]):
            kept.add(token)
            mass += p[token]
            if mass >= params.top_p:
                break
        p = np.array([p[token] if token in kept else 0 for token in range(len(p))])
        p /= p.sum()
    if params.min_p:
        p = np.where(p >= params.min_p * p.max(), p, 0)
        p /= p.sum()
    return p


CASES = {
    "temperature 1": SamplingParams(),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "temperature 1.8": SamplingParams(temperature=1.8),
    "top_p": SamplingParams(top_p=0.9),
    "top_k": SamplingParams(top_k=5),
    "min_p": SamplingParams(min_p=0.15),
    "repetition": SamplingParams(repetition_penalty=1.6),
    "frequency": SamplingParams(frequency_penalty=0.8),
    "presence": SamplingParams(presence_penalty=-1.1),
    "bias": SamplingParams(logit_bias={3: 2.0, 7: -3.0, 20: 1.0}),
    "all": SamplingParams(
        temperature=1.3,
        top_k=14,
        top_p=0.92,
        min_p=0.03,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        repetition_penalty=1.3,
        logit_bias={4: 1.5, 11: 1.0},
    ),
}


def base_logits(seed: int = 1) -> torch.Tensor:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[[2, 4, 6]] += 1.5  # so that the penalties matter
    return logits


def rows_for(params: SamplingParams, count: int) -> list[Row]:
    """Half of them vary the position, half the seed."""
    history = TokenCounts(PROMPT, OUTPUT)
    half = count // 2
    return [Row(replace(params, seed=11), position, history, DRAFTED) for position in range(half)] + [
        Row(replace(params, seed=seed), 9, history, DRAFTED) for seed in range(1000, 1000 + count - half)
    ]


@pytest.mark.parametrize("name", CASES)
def test_samples_follow_the_analytic_distribution(name: str) -> None:
    params = CASES[name]
    logits = base_logits()
    expected = analytic(logits.numpy(), params)
    tokens = draw(logits.expand(SAMPLES, -1), rows_for(params, SAMPLES))
    counts = np.bincount(tokens.numpy(), minlength=VOCAB)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    if name != "temperature 1":  # the transform changes something, or the test could not fail
        assert np.abs(expected - analytic(logits.numpy(), SamplingParams())).sum() > 0.05
    assert chi_square(counts[possible], expected[possible] * SAMPLES) > 1e-4


@pytest.mark.parametrize("name", ["temperature 1", "temperature 1.8", "top_p", "all"])
def test_samples_under_a_grammar_follow_the_renormalised_distribution(name: str) -> None:
    """Of 7 tokens that may come, the penalised and the biased ones among them."""
    params, allowed = CASES[name], [1, 3, 4, 7, 9, 11, 20]
    mask = np.packbits(np.isin(np.arange(VOCAB), allowed), bitorder="little")
    logits = base_logits()
    expected = analytic(logits.numpy(), params, allowed)
    rows = [row._replace(allowed=lambda: mask) for row in rows_for(params, SAMPLES)]
    counts = np.bincount(draw(logits.expand(SAMPLES, -1), rows).numpy(), minlength=VOCAB)
    possible = expected > 0
    assert 1 < possible.sum() <= len(allowed) and counts[~possible].sum() == 0
    assert chi_square(counts[possible], expected[possible] * SAMPLES) > 1e-4


def test_greedy_takes_penalties_and_bias_and_no_noise() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 9], logits[0, 10] = 3.0, 2.9, 2.5
    greedy = SamplingParams(temperature=0.0)

    def token(**changes: object) -> int:
        row = Row(replace(greedy, **changes), 5, TokenCounts([4], []), [])  # type: ignore[arg-type]
        return int(draw(logits, [row])[0])

    assert token() == token(seed=99) == 4
    assert token(repetition_penalty=2.0) == 9
    assert token(presence_penalty=1.0) == 4  # counts the output alone, and token 4 is in the prompt
    assert token(logit_bias={10: 1.0}) == 10
    assert logits[0, 4] == 3.0, "the logits were changed"


def test_drafted_tokens_count_as_output() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 8], logits[:, 9] = 1.0, 0.5
    params = SamplingParams(temperature=0.0, frequency_penalty=0.4)
    history = TokenCounts([8, 8], [])
    rows = [Row(params, 5 + j, history, [8, 8][:j]) for j in range(3)]
    assert draw(logits, rows).tolist() == [8, 8, 9]
    history.extend([8, 8])
    assert draw(logits[:1], [Row(params, 7, history, [])]).tolist() == [9]


def test_vocab_size_limits_ids_and_leaves_the_noise_as_it_is() -> None:
    logits = base_logits().expand(500, -1)
    rows = rows_for(SamplingParams(), 500)
    limited = draw(logits, rows, 10)
    assert int(limited.max()) < 10
    assert torch.equal(limited, draw(logits[:, :10], rows))
    whole = draw(logits, rows)
    below = whole < 10
    assert bool(below.any()) and torch.equal(whole[below], limited[below])
    biased = Row(SamplingParams(temperature=0.0, logit_bias={20: 100.0, 3: 50.0}), 0, None, [])
    assert draw(logits[:1], [biased], 10).tolist() == [3]


def test_ties_and_edges() -> None:
    tied = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    seen = {int(draw(tied, [Row(SamplingParams(top_k=2, seed=s), 0, None, [])])[0]) for s in range(200)}
    assert seen == {0, 1, 2}, "tokens that tie with the k-th stay"
    tiny = SamplingParams(top_p=1e-9)
    assert {int(draw(tied + torch.tensor([0, 0.1, 0, 0]), [Row(replace(tiny, seed=s), 0, None, [])])[0]) for s in range(50)} == {1}  # fmt: skip  # noqa: E501
    for extreme in (SamplingParams(temperature=1e-40), SamplingParams(min_p=1.0), SamplingParams(top_k=1)):
        assert draw(base_logits()[None], [Row(extreme, 0, None, [])])[0] == base_logits().argmax()
    assert draw(base_logits()[None], [Row(SamplingParams(top_k=10**9), 0, None, [])]).shape == (1,)


def any_params() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.0, 0.6, 1.0, 1.5]),
        top_k=st.sampled_from([0, 0, 1, 4, 30]),
        top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3]),
        min_p=st.sampled_from([0.0, 0.0, 0.1]),
        presence_penalty=st.sampled_from([0.0, 0.0, 1.0]),
        frequency_penalty=st.sampled_from([0.0, 0.0, -0.5]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.4]),
        logit_bias=st.dictionaries(st.integers(0, 200), st.sampled_from([-1.0, 2.0]), max_size=3),
        seed=st.integers(0, 2**64 - 1),
    )


@settings(max_examples=60)
@given(
    st.lists(any_params(), min_size=2, max_size=9), st.integers(0, 2**31), st.sampled_from([201, 33, 1000])
)
def test_rows_do_not_depend_on_other_rows(params: list[SamplingParams], seed: int, vocab: int) -> None:
    rng = random.Random(seed)
    logits = torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(seed)) * 2
    rows = []
    for one in params:
        history = TokenCounts([rng.randrange(40) for _ in range(9)], [rng.randrange(40) for _ in range(5)])
        rows.append(
            Row(one, rng.randrange(10_000), history, [rng.randrange(40) for _ in range(rng.randrange(3))])
        )
    together = draw(logits, rows)
    for index, row in enumerate(rows):
        assert draw(logits[index : index + 1].clone(), [row])[0] == together[index]


@given(
    st.lists(st.integers(0, 9), max_size=8),
    st.lists(st.lists(st.integers(0, 30), max_size=20), max_size=6),
    st.lists(st.integers(0, 30), max_size=4),
)
def test_counts_grow_as_they_would_be_counted_afresh(
    prompt: Sequence[int], pieces: list[list[int]], drafted: list[int]
) -> None:
    counts = TokenCounts(prompt)
    for piece in pieces:
        counts.with_drafted([1, 99])  # changes nothing
        counts.extend(piece)
    committed = [token for piece in pieces for token in piece]
    for (ids, found), tokens, counted in (
        (counts.committed, {*prompt, *committed}, committed),
        (counts.with_drafted(drafted), set(drafted), committed + drafted),
    ):
        assert len(ids) == len(tokens)
        assert dict(zip(ids.tolist(), found.tolist(), strict=True)) == {
            token: counted.count(token) for token in tokens
        }
