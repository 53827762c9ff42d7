"""How tokens are drawn in recorded steps: from logits that stay where they are.

By torch's own operations in torch_drawing.py, by a GPU's kernels in kernel_drawing.py. Both give the tokens
that `draw` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from outrider.engine.group import Group
from outrider.sampling.packed_rows import Fields, PackedRows
from outrider.sampling.sampler import draw
from outrider.sampling.shaping import Row
from outrider.uploading import uploaded

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
