"""Index tensors of one step: built once from the sessions' parts, shared by all layers. Pure.

Every token is its own attention row with one query, so that its result cannot depend on which tokens run
beside it. Sessions whose keys pad to the same length form a group, whose keys are gathered together; within a
group, tokens are ordered so that every attention call takes a contiguous run of them: either all tokens of
one session (its keys are repeated by stride 0), or one token each of several sessions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

KEY_MULTIPLE = 64  # keys are padded to a multiple of it
# Keys before a sliding window are left out in whole multiples of the key block of torch's CPU attention
# kernel: such a block, fully masked, leaves that kernel's running sum as it was.
WINDOW_MULTIPLE = 512

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Work:
    """One session's part of a step."""

    blocks: Sequence[int]  # its block table, covering start + len(tokens) slots
    start: int  # position of tokens[0] = tokens already in the cache
    tokens: Sequence[int]  # one token; a token and its drafts; or a chunk of a prompt
    rows: int  # logits wanted for the last `rows` of them (0: a chunk that is not the prompt's last)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Consecutive tokens that attend in one call: one token each of as many sessions, or all of one
    session."""

    tokens: slice  # of the step
    mask_rows: slice  # the same, counted from the group's first token
    sessions: slice  # of the group


@dataclass(frozen=True, slots=True)
class KeyView:
    """Which keys a group gathers, for one window size."""

    blocks: torch.Tensor  # [S * n] int64
    keys: int  # K = n * block size, a multiple of KEY_MULTIPLE
    mask: torch.Tensor  # [T_group, 1, 1, K] 0 or -inf


@dataclass(frozen=True, slots=True)
class Group:
    """Sessions whose padded key lengths are equal."""

    calls: tuple[AttentionCall, ...]
    tables: tuple[Ints, ...]  # each session's blocks
    starts: Ints  # [S] first position that runs
    ends: Ints  # [S] tokens in the cache after the step
    positions: Ints  # [T_group]
    sessions: Ints  # [T_group] index of each token's session


@dataclass(slots=True, eq=False)
class StepInputs:
    """All that the forward pass needs to know of a step."""

    input_ids: torch.Tensor  # [1, T]
    position_ids: torch.Tensor  # [1, T]
    slots: torch.Tensor  # [T] where each token's key and value go
    keep: torch.Tensor  # [max(rows, 1)] tokens whose logits are wanted, in the caller's order
    rows: int
    groups: tuple[Group, ...]
    block_size: int
    scratch_block: int
    mask_dtype: torch.dtype
    views: dict[int | None, tuple[KeyView, ...]]  # by window size; None = no window
    plan: npt.NDArray[np.int32] | None = None  # the works as other ranks are told of them

    def key_views(self, window: int | None) -> tuple[KeyView, ...]:
        """The groups' keys for a layer with this window (positions that a token sees, itself included)."""
        if window not in self.views:
            self.views[window] = tuple(self._key_view(group, window) for group in self.groups)
        return self.views[window]

    def _key_view(self, group: Group, window: int | None) -> KeyView:
        size = self.block_size
        seen_from = np.maximum(group.starts + 1 - window, 0) if window else np.zeros_like(group.starts)
        first = seen_from // WINDOW_MULTIPLE * WINDOW_MULTIPLE  # [S] position of the first key gathered
        keys = padded_keys(int((group.ends - first).max()))
        blocks = np.full((len(first), keys // size), self.scratch_block, dtype=np.int64)  # [S, n]
        for row, table, skipped in zip(blocks, group.tables, first // size, strict=True):
            kept = table[skipped : skipped + len(row)]
            row[: len(kept)] = kept
        device = self.slots.device
        position = torch.from_numpy(group.positions).to(device)[:, None]  # [T, 1]
        key = torch.from_numpy(first[group.sessions]).to(device)[:, None] + torch.arange(keys, device=device)
        hidden = key > position  # [T, K]
        if window:
            hidden |= key <= position - window
        mask = torch.zeros(hidden.shape, dtype=self.mask_dtype, device=device).masked_fill_(
            hidden, -torch.inf
        )
        return KeyView(torch.from_numpy(blocks.reshape(-1)).to(device), keys, mask[:, None, None])


def padded_keys(length: int) -> int:
    """Keys to gather for a session of this length: few different sizes, at most a quarter too long beyond
    256."""
    multiple = max(KEY_MULTIPLE, 1 << max(0, (length - 1).bit_length() - 3))
    return -(-length // multiple) * multiple


def build_step(
    works: Sequence[Work],
    *,
    block_size: int,
    scratch_block: int,
    device: torch.device,
    mask_dtype: torch.dtype,
    windows: Iterable[int | None],
) -> StepInputs:
    """The step's index tensors. The scratch block stands for keys that pad a session."""
    counts = np.array([len(work.tokens) for work in works], dtype=np.int64)  # [W]
    starts = np.array([work.start for work in works], dtype=np.int64)
    ends = starts + counts
    buckets = np.array([padded_keys(int(end)) for end in ends], dtype=np.int64)
    order, alone, group_bounds = _arrange(counts, buckets)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))  # place of each work

    total = int(counts.sum())
    flat_ids = np.fromiter(chain.from_iterable(work.tokens for work in works), np.int64, total)
    flat_work = np.repeat(np.arange(len(works)), counts)
    first_flat = np.cumsum(counts) - counts
    flat_index = np.arange(total) - first_flat[flat_work]  # of the token within its work
    flat_rank = rank[flat_work]
    is_alone = alone[flat_rank]
    place = np.lexsort(
        (
            np.where(is_alone, flat_index, flat_rank),
            np.where(is_alone, flat_rank, flat_index),
            ~is_alone,
            np.searchsorted(group_bounds, flat_rank, side="right"),
        )
    )  # [T] index into the caller's order
    work_of, positions = flat_work[place], (starts[flat_work] + flat_index)[place]

    tables = [np.asarray(work.blocks, dtype=np.int64) for work in works]
    first_block = np.cumsum([0, *map(len, tables)])[:-1]
    blocks = np.concatenate(tables)[first_block[work_of] + positions // block_size]
    slots = blocks * block_size + positions % block_size

    groups = []
    token = 0
    for low, high in zip([0, *group_bounds], [*group_bounds, len(works)], strict=True):
        members = order[low:high]
        size = int(counts[members].sum())
        run = slice(token, token + size)
        groups.append(
            Group(
                _calls(counts[members], int(alone[low:high].sum()), token),
                tuple(tables[member] for member in members),
                starts[members],
                ends[members],
                positions[run],
                rank[work_of[run]] - low,
            )
        )
        token += size

    inverse = np.empty_like(place)
    inverse[place] = np.arange(total)
    past = np.cumsum(counts)  # end of each work in the caller's order
    keep = np.concatenate([inverse[end - work.rows : end] for work, end in zip(works, past, strict=True)])
    rows = len(keep)

    def tensor(values: Ints) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    inputs = StepInputs(
        tensor(flat_ids[place])[None],
        tensor(positions)[None],
        tensor(slots),
        tensor(keep if rows else np.zeros(1, dtype=np.int64)),
        rows,
        tuple(groups),
        block_size,
        scratch_block,
        mask_dtype,
        {},
    )
    for window in windows:
        inputs.key_views(window)
    return inputs


def _arrange(counts: Ints, buckets: Ints) -> tuple[Ints, npt.NDArray[np.bool_], list[int]]:
    """Order of the works (by group, then longest first), which of them attend alone, where groups 2.. begin.

    A group of sessions with n_0 >= n_1 >= ... tokens costs i calls for the i longest on their own plus n_i
    calls shared by the others; the cheapest i is taken."""
    order = np.lexsort((-counts, buckets))
    bounds = [int(i) for i in np.flatnonzero(np.diff(buckets[order])) + 1]
    alone = np.zeros(len(order), dtype=np.bool_)
    for low, high in zip([0, *bounds], [*bounds, len(order)], strict=True):
        shared_calls = np.append(counts[order[low:high]], 0)
        own = int(np.argmin(np.arange(high - low + 1) + shared_calls))
        alone[low : low + own] = True
    return order, alone, bounds


def _calls(counts: Ints, own: int, first_token: int) -> tuple[AttentionCall, ...]:
    """The attention calls of a group whose sessions, longest first, have `counts` tokens."""
    calls = []
    row = 0
    for session in range(own):
        rows, row = slice(row, row + int(counts[session])), row + int(counts[session])
        calls.append(_call(rows, slice(session, session + 1), first_token))
    shared = counts[own:]
    for index in range(int(shared[0]) if len(shared) else 0):
        taking_part = int((shared > index).sum())
        rows, row = slice(row, row + taking_part), row + taking_part
        calls.append(_call(rows, slice(own, own + taking_part), first_token))
    return tuple(calls)


def _call(rows: slice, sessions: slice, first_token: int) -> AttentionCall:
    return AttentionCall(slice(rows.start + first_token, rows.stop + first_token), rows, sessions)
