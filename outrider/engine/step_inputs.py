"""Index tensors of one step: built once from the sessions' parts, shared by all layers. Pure.

Every token is its own attention row with one query, so that its result cannot depend on which tokens run
beside it. Sessions whose keys pad to the same length form a group, which is cut into tiles whose keys fit
into the processor's caches. A tile's keys are brought together, or read where they lie if it is one session
whose blocks follow one another; then its tokens attend to them. Within a tile, tokens are ordered so that
every attention call takes a contiguous run of them: either all tokens of one session (its keys are repeated
by stride 0), or one token each of several sessions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt
import torch

KEY_MULTIPLE = 64  # keys are padded to a multiple of it
# Keys before a sliding window are left out in whole multiples of the key block of torch's CPU attention
# kernel: such a block, fully masked, leaves that kernel's running sum as it was.
WINDOW_MULTIPLE = 512
TILE_BYTES = 2**22  # of keys and values brought together at a time: they stay in the caches until used

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
    sessions: slice  # of the tile


@dataclass(frozen=True, slots=True)
class Tile:
    """Sessions whose keys are brought together at a time."""

    sessions: slice  # of the group
    calls: tuple[AttentionCall, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Sessions whose padded key lengths are equal."""

    first_token: int  # of the step
    tiles: tuple[Tile, ...]
    tables: tuple[Ints, ...]  # each session's blocks
    starts: Ints  # [S] first position that runs
    ends: Ints  # [S] tokens in the cache after the step
    positions: Ints  # [T_group]
    sessions: Ints  # [T_group] index of each token's session


@dataclass(frozen=True, slots=True)
class TileKeys:
    """Which keys a tile attends to, for one window size."""

    blocks: torch.Tensor | slice  # [S * n] int64, or the run of n blocks in which its one session lies
    sessions: int  # S
    calls: tuple[tuple[slice, slice, torch.Tensor], ...]  # tokens, sessions, mask [n, 1, 1, K] of 0 and -inf


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
    views: dict[int | None, tuple[TileKeys, ...]]  # by window size; None = no window
    plan: npt.NDArray[np.int32] | None = None  # the works as other ranks are told of them

    def tiles(self, window: int | None) -> tuple[TileKeys, ...]:
        """All tiles, for a layer with this window (positions that a token sees, itself included)."""
        if window not in self.views:
            self.views[window] = tuple(
                tile for group in self.groups for tile in self._tiles_of(group, window)
            )
        return self.views[window]

    def _tiles_of(self, group: Group, window: int | None) -> list[TileKeys]:
        size = self.block_size
        seen_from = np.maximum(group.starts + 1 - window, 0) if window else np.zeros_like(group.starts)
        first = seen_from // WINDOW_MULTIPLE * WINDOW_MULTIPLE  # [S] position of the first key gathered
        keys = padded_keys(int((group.ends - first).max()))
        blocks = np.full((len(first), keys // size), self.scratch_block, dtype=np.int64)  # [S, n]
        for row, table, skipped in zip(blocks, group.tables, (first // size).tolist(), strict=True):
            kept = table[skipped : skipped + len(row)]
            row[: len(kept)] = kept
        mask = self._mask(group.positions - first[group.sessions], keys, window)[:, None, None]
        everywhere = torch.from_numpy(blocks).to(self.slots.device)
        found = []
        for tile in group.tiles:
            calls = tuple(
                (
                    call.tokens,
                    call.sessions,
                    mask[call.tokens.start - group.first_token : call.tokens.stop - group.first_token],
                )
                for call in tile.calls
            )
            count = tile.sessions.stop - tile.sessions.start
            run = self._run(blocks[tile.sessions.start]) if count == 1 else None
            found.append(TileKeys(run or everywhere[tile.sessions].reshape(-1), count, calls))
        return found

    def _run(self, blocks: Ints) -> slice | None:
        """The blocks as a run, where they follow one another. What pads them may be anybody's then, since
        padding is masked."""
        begin, kept = int(blocks[0]), blocks[blocks != self.scratch_block]
        if begin + len(blocks) > self.scratch_block + 1 or np.any(np.diff(kept) != 1):
            return None
        return slice(begin, begin + len(blocks))

    def _mask(self, places: Ints, keys: int, window: int | None) -> torch.Tensor:
        """[T, keys] of 0 and -inf for tokens at these places among the keys: rows of one band, which is built
        once."""
        last = int(places.max())
        band = np.full(last + keys, -np.inf, dtype=np.float32)  # [last - place + key]
        band[max(0, last + 1 - window) if window else 0 : last + 1] = 0.0
        bands = torch.from_numpy(band).to(self.slots.device, self.mask_dtype).unfold(0, keys, 1)
        return bands.index_select(0, torch.from_numpy(last - places).to(self.slots.device))


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
    key_bytes: int = 0,
) -> StepInputs:
    """The step's index tensors. The scratch block stands for keys that pad a session.

    `key_bytes`: of a token's key and value in one layer; 0 where that is not known yet."""
    counts = np.array([len(work.tokens) for work in works], dtype=np.int64)  # [W]
    starts = np.array([work.start for work in works], dtype=np.int64)
    ends = starts + counts
    buckets = np.array([padded_keys(int(end)) for end in ends], dtype=np.int64)
    order = np.lexsort((-counts, buckets))  # of the works: by group, then longest first
    group_bounds = [0, *(np.flatnonzero(np.diff(buckets[order])) + 1).tolist(), len(order)]
    tiles = _tiles(counts[order].tolist(), buckets[order].tolist(), group_bounds, key_bytes)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))  # place of each work

    total = int(counts.sum())
    flat_ids = np.fromiter(chain.from_iterable(work.tokens for work in works), np.int64, total)
    flat_work = np.repeat(np.arange(len(works)), counts)
    first_flat = np.cumsum(counts) - counts
    flat_index = np.arange(total) - first_flat[flat_work]  # of the token within its work
    flat_rank = rank[flat_work]
    tile_of = np.repeat(np.arange(len(tiles)), [high - low for low, high, _ in tiles])  # [W]
    alone = np.arange(len(order)) < np.array([low + own for low, _, own in tiles])[tile_of]
    is_alone = alone[flat_rank]
    place = np.lexsort(
        (
            np.where(is_alone, flat_index, flat_rank),
            np.where(is_alone, flat_rank, flat_index),
            ~is_alone,
            tile_of[flat_rank],
        )
    )  # [T] index into the caller's order
    work_of, positions = flat_work[place], (starts[flat_work] + flat_index)[place]

    tables = [np.asarray(work.blocks, dtype=np.int64) for work in works]
    first_block = np.cumsum([0, *map(len, tables)])[:-1]
    blocks = np.concatenate(tables)[first_block[work_of] + positions // block_size]
    slots = blocks * block_size + positions % block_size

    groups = []
    token, lengths = 0, counts[order].tolist()
    for low, high in pairwise(group_bounds):
        first_token, of_group = token, []
        for begin, end, own in tiles:
            if low <= begin < high:
                calls, token = _calls(lengths[begin:end], own, token)
                of_group.append(Tile(slice(begin - low, end - low), calls))
        members, run = order[low:high], slice(first_token, token)
        groups.append(
            Group(
                first_token,
                tuple(of_group),
                tuple(tables[member] for member in members),
                starts[members],
                ends[members],
                positions[run],
                rank[work_of[run]] - low,
            )
        )

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
        inputs.tiles(window)
    return inputs


def _tiles(
    counts: Sequence[int], buckets: Sequence[int], group_bounds: Sequence[int], key_bytes: int
) -> list[tuple[int, int, int]]:
    """Groups cut into tiles: (first work, end, how many of the first attend on their own).

    A tile of sessions with n_0 >= n_1 >= ... tokens costs i calls for the i longest on their own plus n_i
    calls shared by the others; the cheapest i is taken."""
    tiles = []
    for low, high in pairwise(group_bounds):
        most = max(1, TILE_BYTES // (buckets[low] * key_bytes)) if key_bytes else high - low
        for begin in range(low, high, most):
            end = min(begin + most, high)
            shared_calls = [*counts[begin:end], 0]
            tiles.append((begin, end, min(range(end - begin + 1), key=lambda own: own + shared_calls[own])))
    return tiles


def _calls(counts: Sequence[int], own: int, token: int) -> tuple[tuple[AttentionCall, ...], int]:
    """The attention calls of a tile whose sessions, longest first, have `counts` tokens, and the step's token
    after them."""
    calls = []
    for session in range(own):
        calls.append(AttentionCall(slice(token, token + counts[session]), slice(session, session + 1)))
        token += counts[session]
    shared = counts[own:]
    for index in range(shared[0] if shared else 0):
        taking_part = sum(count > index for count in shared)
        calls.append(AttentionCall(slice(token, token + taking_part), slice(own, own + taking_part)))
        token += taking_part
    return tuple(calls), token
