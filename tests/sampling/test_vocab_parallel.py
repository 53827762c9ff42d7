"""Drawn from slices of the vocabulary: the very tokens that are drawn from all of it."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.sampling.how import How
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row, draw
from outrider.sampling.vocab_parallel import vocab_parallel
from tests.sampling.ranks import chosen

VOCAB = 199
KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.3, seed=2**64 - 1),
    SamplingParams(temperature=1e-38, seed=1),
    SamplingParams(temperature=100.0, seed=9),
]


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("allowed", [VOCAB, 120, 3])
def test_every_rank_finds_the_token_of_the_whole_vocabulary(size: int, allowed: int) -> None:
    rng = random.Random(size)
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(60, VOCAB, generator=generator) * 3
    rows = [Row(rng.choice(KINDS), rng.randrange(10**6), None, ()) for _ in range(60)]
    expected = draw(logits, rows, allowed).tolist()
    assert len(set(expected)) > (20 if allowed > 3 else 2)
    assert chosen(logits, rows, size, allowed) == [expected] * size


def test_of_equals_the_lowest_id_is_taken() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, [150, 60, 170]] = 4.0
    logits[2, [199 - 1, 100]] = 1.0
    rows = [Row(KINDS[0], 1, None, ())] * 3
    assert draw(logits, rows).tolist() == [0, 60, 100]
    assert chosen(logits, rows, 2, VOCAB) == [[0, 60, 100]] * 2


def test_only_greedy_rows_need_no_common_maximum() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    rows = [Row(KINDS[0], position, None, ()) for position in range(4)]
    assert chosen(logits, rows, 2, VOCAB)[0] == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("params", "how"),
    [
        (SamplingParams(temperature=0.0), How.GREEDY),
        (SamplingParams(temperature=0.0, top_k=5, top_p=0.5, min_p=0.5), How.GREEDY),
        (SamplingParams(temperature=0.5), How.NOISY),
        (SamplingParams(top_k=5), How.WHOLE),
        (SamplingParams(top_p=0.9), How.WHOLE),
        (SamplingParams(min_p=0.1), How.WHOLE),
        (SamplingParams(temperature=0.0, presence_penalty=0.1), How.WHOLE),
        (SamplingParams(temperature=0.0, repetition_penalty=1.1), How.WHOLE),
        (SamplingParams(frequency_penalty=0.1), How.WHOLE),
        (SamplingParams(temperature=0.0, logit_bias={1: 2.0}), How.WHOLE),
    ],
)
def test_what_a_slice_is_enough_for(params: SamplingParams, how: How) -> None:
    assert vocab_parallel(Row(params, 1, None, ())).how is how
