"""What a draw says beside its token."""

from __future__ import annotations

import pytest
import torch

from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row, TokenCounts, draw, rank

VOCAB = 50
ROWS = [
    Row(SamplingParams(temperature=0.0), 7, None, ()),
    Row(SamplingParams(temperature=0.8, seed=3), 7, None, ()),
    Row(SamplingParams(temperature=1.3, seed=4, top_p=0.7), 9, None, ()),
    Row(SamplingParams(temperature=0.0, presence_penalty=2.0), 9, TokenCounts([1, 2], [3, 3]), (4, 5)),
    Row(SamplingParams(temperature=0.5, seed=5, logit_bias={11: 3.0}), 2, None, ()),
]


def logits(seed: int) -> torch.Tensor:
    return torch.randn(len(ROWS), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("seed", range(20))
def test_the_best_is_the_token_drawn_and_each_next_what_would_be_drawn_without_those_before(
    seed: int,
) -> None:
    scores = logits(seed)
    for row, ranked in zip(ROWS, rank(scores, ROWS, 3, VOCAB - 5), strict=True):
        alone = scores[ROWS.index(row)].clone()[None]
        for token in ranked.ids:
            if row.params.top_p == 1.0:  # else what is left may be another set
                assert draw(alone, [row], VOCAB - 5).tolist() == [token]
            alone[0, token] = -torch.inf
        assert draw(scores, ROWS, VOCAB - 5).tolist()[ROWS.index(row)] == ranked.ids[0]


def test_shares_fall_and_come_to_at_most_one() -> None:
    for ranked in rank(logits(1), ROWS, 4):
        assert list(ranked.shares) == sorted(ranked.shares, reverse=True)
        assert 0 < sum(ranked.shares) <= 1 + 1e-6


def test_a_greedy_share_is_the_softmax_and_the_logits_stay() -> None:
    scores = logits(2)
    before = scores.clone()
    assert rank(scores, ROWS, 1)[0].shares[0] == pytest.approx(float(scores[0].softmax(-1).max()))
    assert torch.equal(scores, before)


def test_no_more_are_ranked_than_there_are() -> None:
    assert len(rank(logits(3), ROWS, 4, 2)[0].ids) == 2
