"""How tokens are drawn in recorded steps: from logits that stay where they are.

Here by torch's own operations; kernel_drawing.py has a GPU's own. Both give the tokens that `draw` does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol

import numpy as np
import torch

from outrider.engine.group import Group
from outrider.errors import in_one_line
from outrider.sampling.draw_kernels import draw_kernels
from outrider.sampling.noise import gumbel_of_ids
from outrider.sampling.packed_rows import Fields, PackedRows
from outrider.sampling.sampler import draw
from outrider.sampling.shaping import MOST, Row
from outrider.uploading import uploaded

log = logging.getLogger(__name__)

AT_ONCE = 64  # rows, which bounds the memory that their noise takes
Numbers = torch.Tensor
"""[3, n] int64: where each row stands among the logits, its key, and the bits of its float64 temperature, 0
for the likeliest token."""


class Drawing(Protocol):
    """What it does with numbers and fields can be recorded. The host waits for nothing here."""

    @property
    def logits(self) -> torch.Tensor:
        """Returns [R, w] float32, of this process's part of the rows."""
        ...

    @property
    def tokens(self) -> torch.Tensor:
        """Returns [R] int64."""
        ...

    @property
    def limit(self) -> torch.Tensor:
        """Returns [1] int64: ids from it on have a logit of -inf."""
        ...

    def take(self, given: torch.Tensor) -> None:
        """Takes in the logits [n, w] of the first rows, and leaves the likeliest token of each."""
        ...

    def draw(self, numbers: Numbers) -> None:
        """Leaves the tokens drawn with noise."""
        ...

    def rank(self, numbers: Numbers, out: torch.Tensor) -> None:
        """Leaves the best ids of each row, and the bits of their float32 shares, in `out` [n, 2, count]
        int32. For a model that is not divided."""
        ...

    def draw_whole(self, rows: Sequence[Row], at: Sequence[int], vocab_size: int) -> None:
        """Leaves the tokens of rows that stand `at` these places, whatever they ask for. Processes that
        follow have no rows, and no tokens to leave."""
        ...

    @property
    def cutting(self) -> Cutting | None:
        """Returns what draws the same rows by records, where there is such."""
        ...


class Cutting(Protocol):
    """Draws rows that ask for more than a temperature, of a model that is not divided."""

    def change(self, packed: PackedRows) -> None:
        """Applies penalties, biases and grammars to the logits. It is not recorded."""
        ...

    def draw_cut(self, fields: Fields) -> None:
        """Leaves the tokens of rows, drawn from what top_k, top_p and min_p leave."""
        ...

    def rank_cut(self, fields: Fields, out: torch.Tensor) -> None:
        """Does what Drawing.rank does with what they leave."""
        ...


class TorchDrawing:
    """Implements Drawing."""

    cutting = None

    def __init__(
        self, group: Group, rows: int, device: torch.device, vocabulary: torch.Tensor | None = None
    ) -> None:
        """`vocabulary`: the ids that logits are of, if not all; the first of them is always allowed."""
        ids = torch.arange(group.ids.start, group.ids.stop) if vocabulary is None else vocabulary
        self._group = group
        self._named = vocabulary is not None
        self._ids = ids.to(device)
        self.logits = torch.zeros(rows, len(ids), dtype=torch.float32, device=device)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.limit = torch.zeros(1, dtype=torch.int64, device=device)

    def take(self, given: torch.Tensor) -> None:
        logits = self.logits[: len(given)]
        logits.copy_(given)
        logits.masked_fill_(self._barred(), -torch.inf)
        self.tokens[: len(given)].copy_(self._group.likeliest(logits))

    def draw(self, numbers: Numbers) -> None:
        for first in range(0, numbers.shape[1], AT_ONCE):
            rows, keys, temperature = numbers[:, first : first + AT_ONCE]
            self.tokens.index_copy_(0, rows, self._group.likeliest(self._noisy(rows, keys, temperature)))

    def rank(self, numbers: Numbers, out: torch.Tensor) -> None:
        for first in range(0, numbers.shape[1], AT_ONCE):
            some = slice(first, first + AT_ONCE)
            rows, keys, temperature = numbers[:, some]
            greedy = temperature.view(torch.float64)[:, None] == 0
            noisy = self._noisy(rows, keys, temperature).clamp_(min=-MOST)
            scores = torch.where(greedy, self.logits.index_select(0, rows), noisy)
            scores.masked_fill_(self._barred(), -torch.inf)
            best = scores.topk(min(out.shape[2], scores.shape[1]))
            shares = (best.values - scores.logsumexp(-1, keepdim=True)).exp()
            places = slice(best.indices.shape[1])
            out[some, 0, places] = self._ids[best.indices].int()
            out[some, 1, places] = shares.view(torch.int32)

    def draw_whole(self, rows: Sequence[Row], at: Sequence[int], vocab_size: int) -> None:
        draw_whole(self, self._group, rows, at, vocab_size)

    def _barred(self) -> torch.Tensor:
        barred = self._ids >= self.limit
        if self._named:
            barred[:1] = False
        return barred

    def _noisy(self, rows: torch.Tensor, keys: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        """Returns log p' + noise [r, w]; greedy rows have no meaning in it."""
        logits = self.logits.index_select(0, rows)
        most = self._group.greatest(logits)[:, None]
        shaped = (logits - most) / temperature.view(torch.float64).float()[:, None]
        return shaped + gumbel_of_ids(keys, self._ids)


def draw_whole(
    drawing: Drawing, group: Group, rows: Sequence[Row], at: Sequence[int], vocab_size: int
) -> None:
    """Draws from copies of the rows' logits, which the processes of the group bring together."""
    places = uploaded(np.array(at), drawing.logits.device)
    logits = group.whole(drawing.logits.index_select(0, places))
    if rows:
        drawing.tokens.index_copy_(0, places, draw(logits, rows, vocab_size))


def width_of(group: Group) -> int:
    """Returns how many ids kernels are made for: those that this process draws from, at least one."""
    width: int = group.ids.stop - group.ids.start
    return max(1, width)


def drawing_for(
    group: Group, rows: int, device: torch.device, vocabulary: torch.Tensor | None = None
) -> Drawing:
    """Returns the quickest that works on the device, in all processes of the group."""
    found: Drawing | None = None
    if draw_kernels(device, width_of(group), vocabulary is not None) is not None:
        try:
            made = import_module("outrider.engine.kernel_drawing").KernelDrawing
            found = made(group, rows, device, vocabulary)
        except Exception as error:
            log.warning("recorded steps draw tokens without kernels: %s", in_one_line(error))
    agreed = group.agree(found is not None)
    return found if agreed and found is not None else TorchDrawing(group, rows, device, vocabulary)
