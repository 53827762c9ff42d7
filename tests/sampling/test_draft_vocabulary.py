"""A draft of few tokens guesses what one of all tokens would, were the others impossible."""

from __future__ import annotations

import pytest
import torch

from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Ranked, Row, TokenCounts, rank

VOCAB = 300
IDS = torch.tensor([0, 3, 17, 40, 41, 99, 150, 151, 210, 288])


def possible(found: list[Ranked]) -> list[tuple[int, ...]]:
    """Returns the tokens of each row that were not ruled out."""
    pairs = [zip(each.ids, each.shares, strict=True) for each in found]
    return [tuple(token for token, share in row if share > 0) for row in pairs]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, seed=3),
        SamplingParams(temperature=1.0, seed=4, top_k=4, top_p=0.8),
        SamplingParams(temperature=0.9, seed=5, frequency_penalty=1.5, logit_bias={17: 4.0, 2: 50.0}),
        SamplingParams(temperature=0.0, logit_bias={288: 9.0}),
    ],
    ids=["greedy", "drawn", "cut", "penalized", "biased"],
)
@pytest.mark.parametrize("limit", [None, 200])
def test_the_guess_is_the_one_of_all_tokens_with_the_others_impossible(
    params: SamplingParams, limit: int | None
) -> None:
    logits = torch.randn(64, len(IDS), generator=torch.Generator().manual_seed(1)) * 2
    rows = [Row(params, position, TokenCounts([3, 40], [40, 99]), ()) for position in range(64)]
    whole = torch.full((64, VOCAB), -1e30)
    whole[:, IDS] = logits
    expected = possible(rank(whole, rows, 2, limit))
    assert possible(rank(logits, rows, 2, limit, IDS)) == expected
    assert all(token in IDS and token < (limit or VOCAB) for found in expected for token in found)
    assert len(set(expected)) > 2
