"""The attention kernel in Triton's interpreter, which has to be asked for before anything imports Triton:
test_triton_attention.py runs this file in a process of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from outrider.engine import kernel_bits, triton_attention
from outrider.engine.attention import LayerAttention
from outrider.engine.flat_inputs import FlatInputs, Shape
from outrider.engine.kv_pools import PagedPools
from outrider.engine.loading import load_engine
from outrider.engine.paged_attention import PagedAttention
from outrider.engine.parts import Parts
from outrider.engine.reference_attention import reference_attention
from outrider.engine.step_inputs import Work
from tests.tiny_models import build

torch.set_num_threads(1)


@dataclass
class Sessions:
    """Some sessions' keys in a pool whose other slots, and whose other pages, hold nan."""

    parts: Sequence[tuple[int, int]]  # tokens before the step, and in it
    how: LayerAttention
    dtype: torch.dtype
    block_size: int = 32
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
        none = torch.empty(0)
        tables = self.tables[list(which)]
        return FlatInputs(none, none, none, none, 0, ends, none, used, tables, none, none, max(counts))

    def rows(self, which: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
        """The places of these tokens among all queries."""
        ends = list(accumulate(count for _, count in self.parts))
        return torch.cat(
            [
                torch.arange(ends[index] - count, ends[index])
                for index, count in zip(which, counts, strict=True)
            ]
        )

    def attended(self, which: Sequence[int] = (), counts: Sequence[int] = ()) -> tuple[torch.Tensor, bool]:
        """What these tokens get, or all; and whether programs shared a token's keys."""
        which = which or range(len(self.parts))
        counts = counts or [self.parts[index][1] for index in which]
        query = self.query[self.rows(which, counts)]
        room = dict[Any, Any]()
        triton_attention._room(room, query.device, self.how.value_width)[0].zero_()
        kernel = triton_attention.triton_attention
        pools = self.keys, self.values
        found = kernel(query, *pools, self.inputs(which, counts), self.how, self.sinks, room)
        [(sums, _, _, arrivals)] = room.values()
        assert not arrivals.any(), "the next step begins with zeros"
        return found, bool(sums.any())

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


PARTS = ((40, 1), (0, 5), (150, 3))
LONG = ((150, 9), (21, 2))
WAYS = (
    (how(4, 2, 40), LONG),
    (how(3, 3, 64), PARTS),
    (how(7, 1, 80, window=17), PARTS),
    (how(24, 1, 32, window=50), LONG),
    (how(8, 1, 128, softcap=2.0), PARTS),
    (how(2, 1, 256, softcap=5.0, window=40), PARTS),
    (how(4, 1, 64, chunk=24), PARTS),
    (how(4, 2, 64, sinks=True), LONG),
    (how(16, 1, 96, sinks=True, window=33), PARTS),
    (how(4, 2, 96, value_width=64), PARTS),
)
CLOSE = {torch.float32: 3e-6, torch.float16: 3e-3}


def product(a: Any, b: Any, dtype: Any) -> Any:
    return (a.astype(dtype)[:, :, None] * b.astype(dtype)[None]).sum(axis=1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of few keys, so that short texts have many; and products in which it does not matter where in a
    tile a row stands, as a matrix unit's are: those of the interpreter are numpy's."""
    monkeypatch.setattr(triton_attention, "PIECE", 64)
    monkeypatch.setattr(triton_attention, "KEPT_ROWS", 4096)
    monkeypatch.setattr(np, "matmul", product)


# One of the two kinds of numbers for each way: what masks and pieces do does not depend on it.
@pytest.mark.parametrize(
    ("way", "parts", "dtype"), [(*way, list(CLOSE)[index % 2]) for index, way in enumerate(WAYS)]
)
def test_it_computes_attention_and_a_row_has_the_same_bits_in_any_company(
    way: LayerAttention, parts: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = Sessions(parts, way, dtype)
    monkeypatch.setattr(triton_attention, "PROGRAMS", 1)  # goes through all keys of a token
    whole, arrived = sessions.attended()
    assert (whole - sessions.expected()).abs().max() < CLOSE[dtype]
    assert not arrived, "nobody shares"
    monkeypatch.setattr(triton_attention, "PROGRAMS", 24)  # share them
    again, arrived = sessions.attended()
    assert torch.equal(again, whole)
    assert arrived or way.window == 17 or way.chunk, "where there is more than a piece"
    last = len(parts) - 1
    for which, counts in (([0], [1]), ([last, 0], [1, parts[0][1]])):
        alone, _ = sessions.attended(which, counts)
        assert torch.equal(alone, whole[sessions.rows(which, counts)])


@triton.jit
def pieces(keys, found, begins, ends, COUNT: tl.constexpr, PIECE: tl.constexpr):
    key = tl.load(keys + tl.arange(0, COUNT))
    piece = triton_attention._piece_of(key, PIECE)
    tl.store(found + tl.arange(0, COUNT), piece)
    tl.store(begins + tl.arange(0, COUNT), triton_attention._begin_of(piece, PIECE))
    tl.store(ends + tl.arange(0, COUNT), triton_attention._begin_of(piece + 1, PIECE))


def test_pieces_follow_one_another_and_grow_with_the_position() -> None:
    key = torch.arange(2**15, dtype=torch.int32) * 128  # up to four million
    found, begins, ends = torch.empty(3, len(key), dtype=torch.int32)
    pieces[(1,)](key, found, begins, ends, COUNT=len(key), PIECE=256)
    assert ((begins <= key) & (key < ends)).all()
    assert found[0] == 0 and set(found.diff().tolist()) == {0, 1}
    assert (ends - begins <= (begins // 8).clamp(min=256)).all()
    assert found[2**17 // 128] == 56, "which bounds what is kept of a long context"


def test_a_trial_tells_whether_bits_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_bits, "LENGTHS", (72, 70, 3))
    monkeypatch.setattr(kernel_bits, "CHUNKS", (66, 1, 5))
    monkeypatch.setattr(kernel_bits, "WIDE", Shape(24, 8, 12))
    usual, way = triton_attention.KERNEL, how(2, 1, 16, window=100)

    def by_company(*given: Any) -> torch.Tensor:
        monkeypatch.setattr(triton_attention, "PIECE", 64 if len(given[3].keys) == 1 else 128)
        return usual.attend(*given)

    for kernel, expected in ((usual, True), (replace(usual, attend=by_company), False)):
        kept = kernel_bits.kernel_keeps_bits(kernel, [way], torch.float32, torch.device("cpu"))
        assert kept is expected


@pytest.mark.parametrize("window", [None, 20])
def test_a_branch_of_a_tree_has_the_bits_of_a_text(window: int | None) -> None:
    """Which goes on in a second block."""
    way, text, size = how(2, 1, 16, window=window), 61, triton_attention.BLOCK_SIZE
    attention = PagedAttention(triton_attention.KERNEL, PagedPools(20, size), torch.device("cpu"))
    parents = [-1, 0, -1, 2, 3, 4, 4]
    assert attention.lay_out is not None
    places = [place for place in attention.lay_out(text - 1, text, parents) if place is not None]
    assert len(places) == len(parents)
    torch.manual_seed(6)
    numbers = torch.randn(4, text + len(parents), 16)  # two heads of queries, a key and a value of each token

    def attended(work: Work, which: Sequence[int]) -> torch.Tensor:
        prepared = attention.prepare([work])
        attention.arrange(prepared)
        query, key, value = numbers[:2, which], numbers[2:3, which], numbers[3:, which]
        return attention.attend(0, query, key, value, attention.on_device(prepared), way)

    blocks = [7, 3, 12, 5, 9, 1]
    attended(Work(blocks, 0, [0] * (text - 1), 0), range(text - 1))
    found = attended(
        Work(blocks, text - 1, [0] * (1 + len(parents)), 1 + len(parents), parents, places),
        range(text - 1, text + len(parents)),
    )
    for taken in ([0, 1], [2, 3, 4, 5], [2, 3, 4, 6]):
        path = [*range(text), *(text + node for node in taken)]
        alone = attended(Work([15, 14], 0, [0] * len(path), 0), path)
        assert torch.equal(found[[0, *(1 + node for node in taken)]], alone[text - 1 :])


def test_a_model_with_capped_scores_and_windows_is_served_by_it(tmp_path: Path) -> None:
    parts = Parts(("triton",))  # which is refused unless it gives what the model's own code gives
    engine = load_engine(
        str(build("gemma2", tmp_path, num_hidden_layers=2)), kv_memory_bytes=2**24, parts=parts
    )
    assert engine.attention.name == "triton"
    assert {(how.window, how.softcap) for how in engine.attention.layers.values()} == {(24, 3.0), (None, 3.0)}
