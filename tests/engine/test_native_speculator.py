"""Guesses by native_speculator.cpp are those of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from outrider.engine.native import library
from outrider.engine.native_layers import NativeLinear
from outrider.engine.native_speculator import NativeSpeculator
from outrider.engine.speculator import RANKED, Shape, Speculating, Speculator
from outrider.sampling.params import SamplingParams
from outrider.sampling.shaping import Row

pytestmark = pytest.mark.skipif(library() is None, reason="nothing can be compiled here")
HIDDEN, VOCAB, COUNT, GUESSES = 64, 3000, 1100, 3
IDS = torch.arange(COUNT) * 2 + 7
KINDS = [NativeLinear, None]
WAYS = {
    "greedy": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(temperature=0.8, seed=5),
    "hardly drawn": SamplingParams(temperature=1e-300, seed=5),
    "drawn from all alike": SamplingParams(temperature=100.0, seed=2**53),
    "few": SamplingParams(temperature=1.5, top_k=4, seed=9),
    "one": SamplingParams(temperature=1.5, top_k=1, seed=9),
    "the likely": SamplingParams(temperature=2.0, top_p=0.5, seed=3),
    "hardly any": SamplingParams(temperature=2.0, top_p=1e-9, seed=3),
    "not the unlikely": SamplingParams(temperature=2.0, min_p=0.3, seed=4),
    "all of these": SamplingParams(temperature=2.0, top_k=30, top_p=0.8, min_p=0.1, seed=4),
}


class Target:
    """What a speculator reads of one."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.embeddings = nn.Embedding(VOCAB, HIDDEN, dtype=dtype)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def made(
    monkeypatch: pytest.MonkeyPatch, kind: type[NativeLinear] | None, dtype: torch.dtype = torch.float32
) -> tuple[Speculating, torch.Tensor]:
    """Returns a speculator of these layers, None = of those for 8 bits, and three states."""
    torch.manual_seed(1)
    network = Speculator(Shape(HIDDEN, 96, COUNT, GUESSES)).requires_grad_(False)
    network.head.weight.mul_(6)  # so that there is something to choose
    if kind is not None:
        monkeypatch.setattr("outrider.engine.speculator._fastest", lambda: kind)
    target: Any = Target(dtype)
    with torch.inference_mode():
        found = Speculating(target, network, IDS)
    assert isinstance(found._native, NativeSpeculator)
    return found, torch.randn(3, HIDDEN)


def rows(sampling: SamplingParams, count: int) -> list[list[Row]]:
    return [[Row(sampling, 10 * row + ahead, None, ()) for row in range(count)] for ahead in range(GUESSES)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_they_are_those_of_torch(
    way: str, kind: type[NativeLinear] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculating, states = made(monkeypatch, kind)
    assert speculating._native is not None
    tokens, drawn = [40, 41, 42], rows(WAYS[way], 3)
    together = speculating._native.guess(states, tokens, drawn, 0.0)
    for row, found in enumerate(together):
        alone = states[row : row + 1], tokens[row : row + 1], [[ahead[row]] for ahead in drawn], 0.0
        assert speculating._native.guess(*alone) == [found]
        (expected,) = speculating._guess_by_torch(*alone)  # which has candidates of all rows for each
        assert len(found) == len(expected) == GUESSES
        for one, other in zip(found, expected, strict=True):
            assert len(one.ids) == RANKED and set(one.ids) <= set(IDS.tolist())
            assert one.ids[0] == other.ids[0]
            assert one.shares == pytest.approx(other.shares, abs=0.02)


def test_embeddings_may_be_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        speculating, states = made(monkeypatch, NativeLinear, dtype)
        speculating._embeddings.weight.data.copy_(torch.randn(VOCAB, HIDDEN).bfloat16())
        assert speculating._native is not None
        found.append(speculating._native.guess(states, [40, 41, 42], rows(WAYS["greedy"], 3), 0.0))
    assert found[0] == found[1]


def test_they_end_where_nothing_is_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    speculating, states = made(monkeypatch, NativeLinear)
    assert speculating._native is not None
    (every,) = speculating._native.guess(states[:1], [40], rows(WAYS["greedy"], 1), 0.0)
    first, second, _ = (one.shares[0] for one in every)
    assert 0 < first * second < first < 1
    for least, count in ((1.0, 1), (first, 2), (first * second, 3)):
        (found,) = speculating._native.guess(states[:1], [40], rows(WAYS["greedy"], 1), least)
        assert found == every[:count]


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("way", ["greedy", "drawn"])
def test_a_state_that_is_no_number_is_guessed_nothing_behind(
    way: str, odd: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what stands beside it is guessed as if it were alone."""
    speculating, states = made(monkeypatch, NativeLinear)
    assert speculating._native is not None
    alone = speculating._native.guess(states[1:2], [40], [[rows(WAYS[way], 2)[0][1]]], 0.0)
    states[0, 3] = odd
    broken, beside = speculating._native.guess(states[:2], [40, 40], rows(WAYS[way], 2)[:1], 0.0)
    assert broken[0].shares[0] != broken[0].shares[0] and set(broken[0].ids) <= set(IDS.tolist())
    assert [beside] == alone


def test_a_token_without_an_embedding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    speculating, states = made(monkeypatch, NativeLinear)
    assert speculating._native is not None
    with pytest.raises(IndexError, match="does not know"):
        speculating._native.guess(states[:1], [VOCAB], rows(WAYS["greedy"], 1), 0.0)
