"""Log-probabilities of rows: torch's in float64, whatever is beside a row, and in little work."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from outrider.sampling.likeliest import FOLDS, likeliest
from outrider.sampling.logprobs import PromptRows, Scores
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row

LARGE = 151_936
GREEDY = Row(SamplingParams(temperature=0.0), 9, None, ())


@pytest.mark.parametrize("vocab", [1, 7, FOLDS, 1000, 20 * FOLDS + 1, 32_000])
@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_the_likeliest_are_those_of_a_sort(vocab: int, count: int) -> None:
    rng = np.random.default_rng(vocab)
    falling = -np.arange(vocab, dtype=np.float64)
    ruled_out = np.where(np.arange(vocab) % 2, -np.inf, rng.normal(size=vocab))
    ties = rng.integers(-2, 3, vocab)
    for row in (rng.normal(size=vocab), ties, np.zeros(vocab), falling, falling[::-1], ruled_out):
        of = np.ascontiguousarray(row, np.float32)
        expected = np.argsort(-of, kind="stable")[:count]
        assert likeliest(of, count).tolist() == expected.tolist()


@pytest.mark.parametrize("spread", [0.0, 1e-3, 3.0, 30.0, 1e4, 1e38, math.inf, math.nan])
def test_they_are_what_torch_has_in_float64(spread: float) -> None:
    logits = torch.randn(4, LARGE, generator=torch.Generator().manual_seed(1)) * min(spread, 3.0)
    if not spread <= 3.0:
        logits[:, 17] = spread
    scores = Scores([20, 0, None, 3])
    scores.find(logits, [GREEDY] * 4, [7, 8, 9, LARGE - 1])
    prompt = Scores([], [PromptRows(1, [11, 12], 5)], [0, 3])
    assert prompt.read(logits).nan_to_num().equal(logits[[0, 3]].nan_to_num())
    of = logits.double()
    of -= of.logsumexp(-1, keepdim=True)
    assert scores.found.keys() == {0, 1, 3}
    for index, count, own in ((0, 20, 7), (1, 0, 8), (3, 3, LARGE - 1)):
        found = scores.found[index]
        assert found.logprob == near(float(of[index, own]))
        assert [value for _, value in found.top] == [
            near(one) for one in of[index].topk(count).values.tolist()
        ]
        assert all(value == near(float(of[index, token])) for token, value in found.top)
    (told,) = prompt.of_prompts
    assert told.logprobs.tolist() == [near(float(of[1, 11])), near(float(of[2, 12]))]
    assert told.top.tolist() == [near(one) for one in of[1:3].topk(5).values.flatten().tolist()]
    expected = [int((logits[row] > logits[row, own]).sum()) + 1 for row, own in ((1, 11), (2, 12))]
    assert told.ranks.tolist() == expected


def near(expected: float) -> object:
    """As near as float32 tells them; what is next to nothing to a share of itself."""
    return pytest.approx(expected, rel=2e-7, abs=0.0 if abs(expected) < 1e-3 else 1e-6, nan_ok=True)


def test_a_row_s_are_the_same_in_any_company_and_never_above_0() -> None:
    logits = torch.randn(6, 70_000, generator=torch.Generator().manual_seed(2)) * 4
    logits[0, 9] = 40.0  # all but certain
    together = Scores([4] * 6)
    together.find(logits, [GREEDY] * 6, [9] * 6)
    for index, row in enumerate(logits):
        alone = Scores([4])
        alone.find(row[None].clone(), [GREEDY], [9])
        assert alone.found[0] == together.found[index]
        assert all(value <= 0 for _, value in alone.found[0].top)
    assert -1e-6 < together.found[0].logprob < 0


def test_no_row_is_copied_into_more_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What made one who asks for log-probabilities dear to those beside: three passes over float64."""
    monkeypatch.setattr(torch.Tensor, "double", lambda _: pytest.fail("a whole row in float64"))
    monkeypatch.setattr(torch.Tensor, "topk", lambda *_: pytest.fail("torch's topk: 250 microseconds a row"))
    Scores([20]).find(torch.zeros(1, 32_000), [GREEDY], [7])
    Scores([], [PromptRows(0, [5], 20)]).read(torch.zeros(1, 32_000))
