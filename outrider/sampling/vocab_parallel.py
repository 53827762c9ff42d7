"""Draws tokens where each rank has a slice of the vocabulary: the tokens that `draw` gives with all of it.

The noise is keyed by token id, so each rank makes its own slice's. Only rows whose transforms need the whole
distribution (top-k, top-p, min-p), the session's history (penalties, bias) or its grammar are brought to the
leader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from outrider.sampling.how import How, how
from outrider.sampling.noise import gumbel, row_key
from outrider.sampling.shaping import SMALLEST_TEMPERATURE, Row
from outrider.uploading import uploaded

Gather = Callable[
    [torch.Tensor], tuple[torch.Tensor, ...]
]  # all ranks' tensors of this shape, in their order


@dataclass(frozen=True, slots=True)
class VocabParallelRow:
    """One position to choose a token for, as numbers."""

    how: How
    key: int = 0  # of its noise
    temperature: float = 1.0


def vocab_parallel(row: Row) -> VocabParallelRow:
    """Returns what the ranks need to know of a row."""
    way = how(row.params) if row.allowed is None else How.WHOLE
    if way is not How.NOISY:
        return VocabParallelRow(way)
    temperature = max(row.params.temperature, SMALLEST_TEMPERATURE)
    return VocabParallelRow(way, row_key(row.params.seed, row.position), temperature)


@dataclass(eq=False)
class Draws:
    """The tokens to draw in a step."""

    rows: Sequence[Row]  # none at a rank that follows, which is told their numbers alone
    vocab_size: int  # only ids below it are drawn
    asked: Callable[[], None] = lambda: None  # called once the device has been asked for all of the step

    @classmethod
    def told(cls, numbers: tuple[VocabParallelRow, ...], vocab_size: int) -> Draws:
        """Returns the draws as a follower knows them, from the numbers that it was told."""
        draws = cls((), vocab_size)
        draws.numbers = numbers
        return draws

    @cached_property
    def numbers(self) -> tuple[VocabParallelRow, ...]:
        """Returns the rows as all ranks know them."""
        return tuple(vocab_parallel(row) for row in self.rows)

    def which(self, how: How) -> list[int]:
        """Returns the rows that are chosen in this way."""
        return [index for index, row in enumerate(self.numbers) if row.how is how]


def choose_vocab_parallel(
    logits: torch.Tensor, rows: Sequence[VocabParallelRow], first: int, gather: Gather
) -> torch.Tensor:
    """Returns token ids [R] int64, on every rank, for logits [R, w] float32 of the ids from `first` on; w may
    be 0.

    Of equals the lowest id is taken, since ranks hold ascending slices."""
    noisy = [index for index, row in enumerate(rows) if row.how is How.NOISY]
    if noisy:
        index = uploaded(np.array(noisy), logits.device)
        most = greatest(logits[index], gather)[:, None]  # [n, 1] of the whole row
        if logits.shape[1]:
            some = [rows[i] for i in noisy]
            of_rows = np.array([row.temperature for row in some], np.float32)
            temperature = uploaded(of_rows, logits.device)[:, None]
            noise = gumbel([row.key for row in some], logits.shape[1], logits.device, first)
            logits = logits.index_copy(0, index, (logits[index] - most) / temperature + noise)
    return likeliest(logits, first, gather)


def greatest(logits: torch.Tensor, gather: Gather) -> torch.Tensor:
    """Returns the greatest [R] of all ranks' logits [R, w]; w may be 0."""
    own = logits.amax(-1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)
    return torch.stack(gather(own)).amax(0)


def likeliest(logits: torch.Tensor, first: int, gather: Gather) -> torch.Tensor:
    """Returns the ids [R] int64 of the greatest of all ranks' logits [R, w], the lowest of equals; `first` is
    this rank's first id, and w may be 0."""
    best = logits.new_full((len(logits), 2), -torch.inf, dtype=torch.float64)  # [R, 2] value and id
    if logits.shape[1]:
        ids = logits.argmax(-1, keepdim=True)  # [R, 1]
        best[:, :1] = logits.gather(1, ids)
        best[:, 1:] = ids + first
    everyones = torch.stack(gather(best))  # [N, R, 2]
    winner = everyones[:, :, 0].argmax(0)  # [R]
    return everyones[winner, torch.arange(len(logits), device=winner.device), 1].long()
