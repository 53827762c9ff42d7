"""Draws tokens from logits: one pure function, the same for drafter and verifier.

A row's token depends on its logits, its parameters, its position and what comes before it in its session; on
no other row. With the noise keyed by (seed, position, token id), argmax of log p' + Gumbel is an exact sample
of p'.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.sampling import plain_draws
from outrider.sampling.draw_kernels import draw_kernels
from outrider.sampling.ranked import Ranked
from outrider.sampling.shaping import Row
from outrider.sampling.token_counts import TokenCounts

__all__ = ["Ranked", "Row", "TokenCounts", "draw", "rank"]

MOST_IDS = 2**31 - 1


def draw(logits: torch.Tensor, rows: Sequence[Row], vocab_size: int | None = None) -> torch.Tensor:
    """Returns one token for each row of logits [R, V] float32, which stay as they are: [R] int64.

    In this order: repetition penalty (prompt and output), frequency and presence penalty (output), logit
    bias, grammar, temperature, top_k (ties with the k-th stay), top_p (the smallest set of at least that
    mass), min_p, noise. Greedy rows stop after the grammar. Only ids below `vocab_size`, where given, are
    drawn. Of rows that are not needed some are left out: waves.NOT_DRAWN.

    Each row takes the way that its own parameters ask for: what others ask for changes neither its token nor
    what it costs."""
    if kernels := draw_kernels(logits.device, logits.shape[1]):
        return kernels.draw(logits, rows, vocab_size if vocab_size is not None else MOST_IDS)
    return plain_draws.draw(logits, rows, vocab_size)


def rank(
    logits: torch.Tensor,
    rows: Sequence[Row],
    count: int,
    vocab_size: int | None = None,
    vocabulary: torch.Tensor | None = None,
) -> list[Ranked]:
    """Returns the `count` best of each row of logits [R, V], by what `draw` takes the largest of.

    With a `vocabulary` [K] the logits are [R, K], of these ids, which rise; the others cannot be drawn."""
    if kernels := draw_kernels(logits.device, logits.shape[1], vocabulary is not None):
        limit = vocab_size if vocab_size is not None else MOST_IDS
        return possible(kernels.rank(logits, rows, count, limit, vocabulary), rows)
    return possible(plain_draws.rank(logits, rows, count, vocab_size, vocabulary), rows)


def possible(ranked: Sequence[Ranked], rows: Sequence[Row]) -> list[Ranked]:
    """Returns them, those under a grammar without what can never be drawn."""
    return [each if row.allowed is None else each.possible for each, row in zip(ranked, rows, strict=True)]
