"""The attention kernel in Triton's interpreter, which has to be asked for before anything imports Triton:
test_triton_attention.py runs this file in a process of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch

from outrider.engine import triton_attention
from outrider.engine.attention import LayerAttention
from outrider.engine.flat_inputs import FlatInputs
from outrider.engine.reference_attention import reference_attention

torch.set_num_threads(1)


@dataclass
class Sessions:
    """Some sessions' keys in a pool whose other slots, and whose other pages, hold nan."""

    parts: Sequence[tuple[int, int]]  # tokens before the step, and in it
    how: LayerAttention
    dtype: torch.dtype
    block_size: int = 16
    spare_pages: int = 2

    def __post_init__(self) -> None:
        random.seed(3)
        torch.manual_seed(5)
        needed = [-(-(before + count) // self.block_size) for before, count in self.parts]
        blocks = list(range(sum(needed)))
        random.shuffle(blocks)
        self.tables = torch.full(
            (len(needed), max(needed) + self.spare_pages), len(blocks), dtype=torch.int32
        )
        shape = len(blocks) + 1, self.block_size, self.how.key_heads
        self.keys = torch.full((*shape, self.how.width), torch.nan, dtype=self.dtype)
        self.values = torch.full((*shape, self.how.value_width), torch.nan, dtype=self.dtype)
        for row, count, (before, tokens) in zip(self.tables, needed, self.parts, strict=True):
            mine = torch.tensor([blocks.pop() for _ in range(count)])
            row[:count] = mine
            position = torch.arange(before + tokens)
            place = mine[position // self.block_size], position % self.block_size
            for pool in (self.keys, self.values):
                pool[place] = torch.randn(len(position), *pool.shape[2:]).to(self.dtype)
        tokens = sum(count for _, count in self.parts)
        self.query = torch.randn(tokens, self.how.query_heads, self.how.width).to(self.dtype)
        self.sinks = torch.randn(self.how.query_heads) if self.how.sinks else None

    def inputs(self, which: Sequence[int], counts: Sequence[int]) -> FlatInputs:
        """So many last tokens of these sessions."""
        ends = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        used = torch.tensor([sum(self.parts[index]) for index in which], dtype=torch.int32)
        empty = torch.empty(0)
        tables = self.tables[list(which)]
        return FlatInputs(empty, empty, empty, empty, 0, ends, empty, used, tables, max(counts))

    def rows(self, which: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
        """The places of these tokens among all queries."""
        ends = list(accumulate(count for _, count in self.parts))
        return torch.cat(
            [
                torch.arange(ends[index] - count, ends[index])
                for index, count in zip(which, counts, strict=True)
            ]
        )

    def attended(self, which: Sequence[int] = (), counts: Sequence[int] = ()) -> torch.Tensor:
        which = which or range(len(self.parts))
        counts = counts or [self.parts[index][1] for index in which]
        query = self.query[self.rows(which, counts)]
        inputs, room = self.inputs(which, counts), dict[Any, Any]()
        kernel = triton_attention.triton_attention
        found = kernel(query, self.keys, self.values, inputs, self.how, self.sinks, room)
        for _, _, _, arrivals in room.values():
            assert not arrivals.any(), "the next step begins with zeros"
        return found

    def expected(self) -> torch.Tensor:
        """In float64."""
        every = range(len(self.parts))
        inputs = self.inputs(every, [count for _, count in self.parts])
        pools = (pool.nan_to_num(0.0).double() for pool in (self.keys, self.values))
        sinks = None if self.sinks is None else self.sinks.double()
        return reference_attention(self.query.double(), *pools, inputs, self.how, sinks, {})


def how(query_heads: int, key_heads: int, width: int, **more: Any) -> LayerAttention:
    named = {"value_width": width, "window": None, "scale": width**-0.5, "softcap": None, **more}
    return LayerAttention(query_heads, key_heads, width, **named)


WAYS = (
    how(4, 2, 40),
    how(3, 3, 64),
    how(7, 1, 80, window=17),
    how(24, 1, 32, window=100),
    how(8, 1, 128, softcap=2.0),
    how(2, 1, 256, softcap=5.0, window=40),
    how(4, 1, 64, chunk=48),
    how(4, 2, 64, sinks=True),
    how(16, 1, 96, sinks=True, window=33),
    how(4, 2, 96, value_width=64),
)
PARTS = ((40, 1), (0, 5), (333, 9), (117, 3))
CLOSE = {torch.float32: 3e-6, torch.float16: 3e-3}


def product(a: Any, b: Any, dtype: Any) -> Any:
    return (a.astype(dtype)[:, :, None] * b.astype(dtype)[None]).sum(axis=1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of few keys, so that short texts have many; and products in which it does not matter where in a
    tile a row stands, as a matrix unit's are: those of the interpreter are numpy's."""
    monkeypatch.setattr(triton_attention, "PIECE", 32)
    monkeypatch.setattr(np, "matmul", product)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("way", WAYS)
def test_it_computes_attention(way: LayerAttention, dtype: torch.dtype) -> None:
    sessions = Sessions(PARTS, way, dtype)
    assert (sessions.attended() - sessions.expected()).abs().max() < CLOSE[dtype]


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("programs", [1, 7, 64])
def test_a_row_has_the_same_bits_in_any_company(
    way: LayerAttention, dtype: torch.dtype, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one program or by many, whose number is the same or another for the row alone."""
    sessions = Sessions(PARTS, way, dtype)
    monkeypatch.setattr(triton_attention, "PROGRAMS", 2)
    whole = sessions.attended()
    monkeypatch.setattr(triton_attention, "PROGRAMS", programs)
    assert torch.equal(sessions.attended(), whole)
    for which, counts in (([2], [9]), ([2], [1]), ([3, 2], [1, 4])):
        assert torch.equal(sessions.attended(which, counts), whole[sessions.rows(which, counts)])
