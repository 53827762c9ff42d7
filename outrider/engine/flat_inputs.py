"""A step as flat arrays in one of a few shapes: what an attention kernel and a recorded graph need. Pure.

Tokens stand in the caller's order, session after session. What fills a step up to its shape are tokens of
id 0 in sessions of their own, whose only block is the scratch block: nobody sees them. A branch of a tree of
drafts is a session here, too (see paged_trees.py). All arrays of a step lie in one buffer, so that they reach
the device in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.paged_trees import AGAIN
from outrider.engine.step_inputs import Work
from outrider.uploading import uploaded

Ints = npt.NDArray[np.int64]

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512)  # tokens of the recorded shapes
DRAFTED = 16  # most tokens of a session in a step in which nobody reads a prompt
READING_FROM = 32  # tokens from which on there is a shape for steps with pieces of prompts
READING_SESSIONS = 256  # sessions that such a shape has room for, branches of drafts among them


@dataclass(frozen=True, slots=True)
class Shape:
    """What a recorded step has room for."""

    tokens: int
    sessions: int  # those that fill it up included
    longest: int  # most tokens of one session

    def holds(self, counts: Ints, block_size: int) -> bool:
        """Returns whether sessions of so many tokens each fit."""
        spare = self.tokens - int(counts.sum())
        return (
            spare >= 0
            and int(counts.max(initial=0)) <= self.longest
            and len(counts) + -(-spare // self.filling(block_size)) <= self.sessions
        )

    def filling(self, block_size: int) -> int:
        """Returns the most tokens of a session that fills it up."""
        return min(self.longest, block_size)


def recorded_shapes(most_tokens: int = SIZES[-1], fewest_tokens: int = 1) -> tuple[Shape, ...]:
    """Returns the shapes to record, in the order in which to look for one that fits: small first, and of the
    same size that for short runs first, whose kernels have less to skip."""
    shapes = []
    for size in (size for size in SIZES if fewest_tokens <= size <= most_tokens):
        shapes.append(Shape(size, size, min(size, DRAFTED)))
        if size >= READING_FROM:
            shapes.append(Shape(size, min(size, READING_SESSIONS), size))
    return tuple(shapes)


def fitting(shapes: Sequence[Shape], works: Sequence[Work], block_size: int) -> Shape | None:
    """Returns the first shape that holds the works."""
    counts = np.array([len(work.tokens) for work in works], dtype=np.int64)
    return next((shape for shape in shapes if shape.holds(counts, block_size)), None)


def exact(works: Sequence[Work]) -> Shape:
    """Returns the shape that the works fill."""
    counts = [len(work.tokens) for work in works]
    return Shape(sum(counts), len(counts), max(counts))


@dataclass(frozen=True, slots=True)
class Arrays:
    """Views of a step's buffer, of numpy or torch."""

    ids: Any  # [T] int64
    positions: Any  # [T] int64
    slots: Any  # [T] int64, where each token's key and value go
    keep: Any  # [T] int64, tokens whose logits are wanted, then zeros
    query_ends: Any  # [S + 1] int32, ends of the sessions' tokens, after a 0
    key_ends: Any  # [S + 1] int32, ends of their keys if these stood in one row, after a 0
    keys: Any  # [S] int32, tokens of each in the cache after the step
    again_ends: Any  # [T + 1] int32, ends of each token's other slots, after a 0
    again: Any  # [AGAIN * T] int32, the slots where keys and values go once more
    tables: Any  # [S, pages] int32, their blocks


def buffer_bytes(shape: Shape, pages: int) -> int:
    """Returns the size of all arrays of a step whose sessions have `pages` blocks at most."""
    words = 3 * shape.sessions + 3 + (1 + AGAIN) * shape.tokens + shape.sessions * pages
    return 8 * 4 * shape.tokens + 4 * words


def arrays(buffer: Any, shape: Shape, pages: int, int64: Any, int32: Any) -> Arrays:
    """Returns the parts of a buffer of bytes; `int64` and `int32` are its library's types."""
    tokens, sessions = shape.tokens, shape.sessions
    long = buffer[: 8 * 4 * tokens].view(int64).reshape(4, tokens)
    rest = buffer[8 * 4 * tokens : buffer_bytes(shape, pages)].view(int32)
    ends, found = 0, list[Any]()
    for size in (sessions + 1, sessions + 1, sessions, tokens + 1, AGAIN * tokens, sessions * pages):
        found.append(rest[ends : ends + size])
        ends += size
    query_ends, key_ends, keys, again_ends, again, tables = found
    ids, positions, slots, keep = long
    tables = tables.reshape(sessions, pages)
    return Arrays(ids, positions, slots, keep, query_ends, key_ends, keys, again_ends, again, tables)


@dataclass(frozen=True, slots=True)
class FlatStep:
    """A step as prepared: in this process's memory."""

    shape: Shape
    buffer: npt.NDArray[np.uint8]
    pages: int  # most blocks of a session
    sessions: int  # that are real
    rows: int  # logits wanted
    copies: tuple[Sequence[tuple[int, int]], ...] = ()  # slots, from and to, one after the other before it

    @property
    def keep(self) -> torch.Tensor:
        """Returns the places [rows] of the tokens whose logits are wanted."""
        kept = arrays(self.buffer, self.shape, self.pages, np.int64, np.int32).keep[: self.rows]
        return torch.from_numpy(kept)


@dataclass(frozen=True, slots=True)
class FlatInputs:
    """A step as the forward pass reads it: on the device."""

    input_ids: torch.Tensor  # [1, T]
    position_ids: torch.Tensor  # [1, T]
    slots: torch.Tensor  # [T]
    keep: torch.Tensor  # [n]
    rows: int
    query_ends: torch.Tensor  # [S + 1]
    key_ends: torch.Tensor  # [S + 1]
    keys: torch.Tensor  # [S]
    tables: torch.Tensor  # [S, pages]
    again_ends: torch.Tensor  # [T + 1]
    again: torch.Tensor  # [AGAIN * T]
    longest: int  # most tokens of a session


def flatten(
    works: Sequence[Work],
    shape: Shape,
    *,
    block_size: int,
    scratch_block: int,
    again: Sequence[tuple[int, int]] = (),
) -> FlatStep:
    """Fills the arrays of a step without trees. The shape must hold the works. `again`: tokens of the step,
    and slots where their keys and values go once more."""
    counts = np.array([len(work.tokens) for work in works], dtype=np.int64)  # [W]
    starts = np.array([work.start for work in works], dtype=np.int64)
    total = int(counts.sum())
    blocks_of = -(-(starts + counts) // block_size)  # [W] that hold a session's keys
    pages = int(blocks_of.max(initial=1))
    buffer = np.zeros(buffer_bytes(shape, pages), dtype=np.uint8)
    step = arrays(buffer, shape, pages, np.int64, np.int32)

    filling = shape.filling(block_size)
    spare = shape.tokens - total
    fill = np.full(-(-spare // filling), filling, dtype=np.int64)  # tokens of the sessions that fill up
    if spare % filling:
        fill[-1] = spare % filling
    lengths = np.concatenate([counts, fill])
    sessions = len(lengths)
    begins = np.concatenate([starts, np.zeros_like(fill)])

    step.tables[: len(works)] = scratch_block
    step.tables[len(works) :] = scratch_block
    for row, work, count in zip(step.tables, works, blocks_of.tolist(), strict=False):
        row[:count] = work.blocks[:count]
    step.ids[:total] = np.fromiter(chain.from_iterable(work.tokens for work in works), np.int64, total)
    session_of = np.repeat(np.arange(sessions), lengths)  # [T]
    first = np.cumsum(lengths) - lengths
    step.positions[:] = begins[session_of] + np.arange(shape.tokens) - first[session_of]
    block = step.tables[session_of, step.positions // block_size]
    step.slots[:] = block.astype(np.int64) * block_size + step.positions % block_size
    step.query_ends[1 : sessions + 1] = np.cumsum(lengths)
    step.query_ends[sessions + 1 :] = shape.tokens
    step.keys[:sessions] = begins + lengths
    step.key_ends[1:] = np.cumsum(step.keys)
    if again:
        tokens, slots = np.array(again).T
        step.again_ends[1:] = np.cumsum(np.bincount(tokens, minlength=shape.tokens))
        step.again[: len(slots)] = slots[np.argsort(tokens, kind="stable")]

    past = np.cumsum(counts)
    keep = [np.arange(end - work.rows, end) for work, end in zip(works, past, strict=True)]
    rows = np.concatenate(keep) if keep else np.empty(0, dtype=np.int64)
    step.keep[: len(rows)] = rows
    return FlatStep(shape, buffer, pages, len(works), len(rows))


def on_device(step: FlatStep, device: torch.device) -> FlatInputs:
    """Returns the step's arrays copied, for a run that is not recorded."""
    parts = arrays(uploaded(step.buffer, device), step.shape, step.pages, torch.int64, torch.int32)
    return flat_inputs(parts, parts.tables, step.shape, max(step.rows, 1), step.rows)


def flat_inputs(parts: Arrays, tables: torch.Tensor, shape: Shape, kept: int, rows: int) -> FlatInputs:
    """Returns what the forward pass reads, from arrays on the device; logits are computed for `kept`
    tokens."""
    return FlatInputs(
        parts.ids[None],
        parts.positions[None],
        parts.slots,
        parts.keep[:kept],
        rows,
        parts.query_ends,
        parts.key_ends,
        parts.keys,
        tables,
        parts.again_ends,
        parts.again,
        shape.longest,
    )
