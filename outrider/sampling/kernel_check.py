"""Draws that take every way through the kernels: these are compiled by them, and held against the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from outrider.sampling import kernel_draws, plain_draws
from outrider.sampling.params import SamplingParams
from outrider.sampling.ranked import MOST_RANKED
from outrider.sampling.shaping import Row
from outrider.sampling.token_counts import TokenCounts

PLAIN = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, seed=1))
SHAPED = (
    SamplingParams(temperature=0.8, seed=2, top_k=9),
    SamplingParams(temperature=0.8, seed=3, top_p=0.9),
    SamplingParams(temperature=1.2, seed=4, min_p=0.01),
    SamplingParams(temperature=1.2, seed=5, top_k=50, top_p=0.7, logit_bias={1: 5.0}),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5),
)
LOGITS_SEED = 1


def check(device: torch.device, width: int, named: bool) -> None:
    """Raises RuntimeError unless kernels give what a CPU does, for logits [R, width]; `named`: of such ids
    among more."""
    generator = torch.Generator().manual_seed(LOGITS_SEED)
    vocabulary = torch.arange(width) * 2 if named else None
    limit = 2 * width if named else width
    for rows in _steps(limit):
        logits = 3 * torch.randn(len(rows), width, generator=generator)
        there = logits.to(device)
        if not named:
            found = kernel_draws.draw(there, rows, limit).tolist()
            expected = plain_draws.draw(logits, rows, limit).tolist()
            if found != expected:
                raise RuntimeError(f"the kernels draw {found} where {expected} are drawn without")
        best = kernel_draws.rank(there, rows, MOST_RANKED, limit, vocabulary)
        expected_best = plain_draws.rank(logits, rows, MOST_RANKED, limit, vocabulary)
        for row, one, other in zip(rows, best, expected_best, strict=True):
            if one.ids[0] != other.ids[0] or abs(one.shares[0] - other.shares[0]) > 1e-3:
                raise RuntimeError(f"the kernels rank {one} where {other} is found without, for {row.params}")


def _steps(vocab_size: int) -> Iterator[list[Row]]:
    history = TokenCounts([0, 1, 2], [3, 3])
    mask = np.full(-(-vocab_size // 8), 0b10110111, np.uint8)
    yield [Row(params, 5, history, ()) for params in PLAIN]
    shaped = [Row(params, 6, history, (4, 3)) for params in (*PLAIN, *SHAPED)]
    yield shaped
    yield [row._replace(allowed=lambda: mask, params=replace(row.params, seed=9)) for row in shaped]
