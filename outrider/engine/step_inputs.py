"""Index tensors of one step: built once from the sessions' parts, shared by all layers. Pure.

What a token gets must not depend, to the bit, on which tokens run beside it. So it has rows of attention
calls whose other rows do not matter: there are none, or this machine's kernels were found to treat rows alike
(RowBatching). Sessions whose keys pad to the same length form a group, which is cut into tiles whose keys fit
into the processor's caches. A tile's keys are brought together, or read where they lie if it is one session
whose blocks follow one another. Then its tokens attend to them, those of all sessions that have equally many
in one call.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.branching import KEY_BLOCK, OnBranch, put_on_branches, visible
from outrider.engine.state_slots import Turn
from outrider.uploading import uploaded

KEY_MULTIPLE = 64  # keys are padded to a multiple of it
# Keys before a sliding window are left out in whole blocks of torch's kernel: masked ones add nothing there.
# Tokens of a session from which on each query head attends on its own: a mask of all would be large.
MOST_SHARING = 64
TILE_BYTES = 2**22  # of keys and values brought together at a time: they stay in the caches until used

Ints = npt.NDArray[np.int64]


class Work(NamedTuple):
    """One session's part of a step."""

    blocks: Sequence[int]  # its block table, covering start + len(tokens) slots
    start: int  # position of tokens[0] = tokens already in the cache
    tokens: Sequence[int]  # one token; a token and its drafts; or a chunk of a prompt
    rows: int  # logits wanted for the last `rows` of them (0: a chunk that is not the prompt's last)
    # Of its last tokens, if they are a tree:
    parents: Sequence[int] = ()  # which of these each one follows; -1 = the token before them
    places: Sequence[int] = ()  # in which of the session's slots each stands
    moves: Sequence[tuple[int, int]] = ()  # slots that are copied before the step, in every layer: from, to
    standing: int | None = None  # tokens of its text that are not taken back; None: all but the last rows - 1
    turn: Turn | None = None  # what the step does with its state


class View(NamedTuple):
    """Which keys the tokens of a layer see, and how they share them."""

    window: int | None  # positions that a token sees, itself included; None = all
    sharing: int  # query heads that share a key head
    chunk: int | None = None  # a token sees nothing before the last multiple of it


@dataclass(frozen=True, slots=True)
class RowBatching:
    """How the rows that share a session's keys attend in one call, to the same bits however many they are:
    the tokens' query heads that belong to one key head."""

    rows: int  # their number is filled up to a multiple of it
    keys: tuple[int, ...]  # numbers of keys in a key block of the kernel's that give these bits, rising

    def padded(self, keys: int) -> int:
        """Returns the next number of keys that gives the same bits."""
        blocks, last = divmod(keys - 1, KEY_BLOCK)
        return blocks * KEY_BLOCK + self.keys[bisect_right(self.keys, last)]


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Consecutive tokens that attend in one call: equally many of each of consecutive sessions."""

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
    ends: Ints  # [S] slots in use in the step
    counts: Ints  # [S] tokens that run
    positions: Ints  # [T_group] of the tokens, session after session; of those on branches, their places


@dataclass(frozen=True, slots=True)
class Tables:
    """Where the sessions of a step lie."""

    blocks: Ints  # all sessions' blocks, one session's after another's
    first: Ints  # [T] the place there of the first block of each token's session

    def slots(self, positions: Ints, block_size: int) -> Ints:  # [T, ...]
        """Returns the slots of positions of the tokens' sessions."""
        first = self.first.reshape(-1, *[1] * (positions.ndim - 1))
        slots: Ints = self.blocks[first + positions // block_size] * block_size + positions % block_size
        return slots


@dataclass(frozen=True, slots=True)
class TileKeys:
    """Which keys a tile attends to, in one view."""

    blocks: torch.Tensor | slice  # [S * n] int64, or the run of n blocks in which its one session lies
    sessions: int  # S
    calls: tuple[tuple[slice, slice, torch.Tensor], ...]  # tokens, sessions, mask [n, 1, R, K] of 0 and -inf


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
    row_batching: RowBatching | None
    tables: Tables
    views: dict[View, tuple[TileKeys, ...]]
    before: dict[int, tuple[torch.Tensor, torch.Tensor]]  # what `earlier` has found
    ends: Ints  # [works] of each one's tokens in the step
    states: Any = None  # what the step does with recurrent states: see recurrent_state.py
    on_branches: Mapping[int, OnBranch] = field(default_factory=dict)  # by the step's token
    moves: tuple[torch.Tensor, torch.Tensor] | None = None  # slots [n] from and to
    native: Any = None  # the step as native code reads it: see native_attention.py

    def tiles(self, view: View) -> tuple[TileKeys, ...]:
        """Returns all tiles, for a layer with this view.

        The mask of a call has an entry for each session, a row for each of its tokens and sharing heads (or
        for each token only, where these are many), and what fills them up; where rows attend alone, an entry
        of one row for each token."""
        found = self.views.get(view)
        if found is None:
            found = tuple(tile for group in self.groups for tile in self._tiles_of(group, view))
            self.views[view] = found
        return found

    def earlier(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the slots [T, count + 1] of the `count` tokens before each token, and its own; and where
        there are none of these, before a session's first."""
        found = self.before.get(count)
        if found is None:
            positions = self.position_ids[0].numpy(force=True)[:, None] + np.arange(-count, 1)
            slots = self.tables.slots(np.maximum(positions, 0), self.block_size)
            own = self.slots.numpy(force=True)
            for token, branch in self.on_branches.items():
                seen = branch.seen[: count + 1]
                slots[token, count + 1 - len(seen) :] = own[seen[::-1]]
            device = self.slots.device
            found = self.before[count] = uploaded(slots, device), uploaded(positions < 0, device)
        return found

    def _tiles_of(self, group: Group, view: View) -> list[TileKeys]:
        size, sharing = self.block_size, view.sharing
        # Positions of the first keys gathered: [S].
        first = seen_from(group.starts, view) // KEY_BLOCK * KEY_BLOCK
        keys = padded_keys(int((group.ends - first).max()), self.row_batching)
        blocks = np.full((len(first), keys // size), self.scratch_block, dtype=np.int64)  # [S, n]
        for row, table, skipped in zip(blocks, group.tables, (first // size).tolist(), strict=True):
            kept = table[skipped : skipped + len(row)]
            row[: len(kept)] = kept
        calls = [call for tile in group.tiles for call in tile.calls]
        before = np.repeat(first, group.counts)  # [T]
        of_calls = self._of_calls(calls, group, group.positions - before, sharing)  # places among the keys
        places = np.concatenate([each.ravel() for each in of_calls])
        if view.chunk is None:
            rows = self._mask(places, keys, view.window)
        else:
            begins = self._of_calls(calls, group, seen_from(group.positions, view) - before, sharing)
            rows = self._spans(np.concatenate([each.ravel() for each in begins]), places, keys)
        if self.on_branches:
            tokens = self._of_calls(calls, group, group.first_token + np.arange(len(before)), sharing)
            of_rows = np.concatenate([each.ravel() for each in tokens])
            for token in self.on_branches.keys() & set(of_rows.tolist()):
                branch, skipped = self.on_branches[token], before[token - group.first_token]
                seen = branch.sees(int(seen_from(np.array([branch.position]), view)[0])) - skipped
                rows[torch.from_numpy(of_rows == token)] = visible(seen, keys).to(rows)
        ends = np.cumsum([each.size for each in of_calls]).tolist()
        masks = iter(
            rows[end - each.size : end]
            .view(len(each), 1, -1, keys)
            .expand(-1, -1, self._filled(sharing) if each.shape[1] == 1 else -1, -1)
            for each, end in zip(of_calls, ends, strict=True)
        )
        everywhere = uploaded(blocks, self.slots.device)
        found = []
        for tile in group.tiles:
            count = tile.sessions.stop - tile.sessions.start
            run = self._run(blocks[tile.sessions.start]) if count == 1 else None
            with_masks = tuple((call.tokens, call.sessions, next(masks)) for call in tile.calls)
            found.append(TileKeys(run or everywhere[tile.sessions].reshape(-1), count, with_masks))
        return found

    def _of_calls(
        self, calls: Sequence[AttentionCall], group: Group, places: Ints, sharing: int
    ) -> list[Ints]:
        """Returns the places [T] of a group's tokens by the rows of its calls."""
        return [
            self._places(call, places[call.tokens.start - group.first_token :], sharing) for call in calls
        ]

    def _places(self, call: AttentionCall, places: Ints, sharing: int) -> Ints:
        """Returns the places of a call's rows among the keys, by entry.

        [n, R], or [n, 1] if all rows of an entry are one token's. `places` begins with its tokens'."""
        places = places[: call.tokens.stop - call.tokens.start]
        if self.row_batching is None:
            return places[:, None]
        of_tokens = places.reshape(call.sessions.stop - call.sessions.start, -1)  # [n, t]
        tokens = of_tokens.shape[1]
        if tokens == 1:
            return of_tokens
        if tokens >= MOST_SHARING:
            sharing = 1
        row = np.arange(self._filled(tokens * sharing))
        return of_tokens[:, np.minimum(row // sharing, tokens - 1)]

    def _filled(self, rows: int) -> int:
        """Rows of an entry that has so many to compute."""
        if self.row_batching is None:
            return 1
        return -(-rows // self.row_batching.rows) * self.row_batching.rows

    def _run(self, blocks: Ints) -> slice | None:
        """Returns the blocks as a run, where they follow one another. What pads them may be anybody's then,
        since padding is masked."""
        begin, kept = int(blocks[0]), blocks[blocks != self.scratch_block]
        if begin + len(blocks) > self.scratch_block + 1 or np.any(np.diff(kept) != 1):
            return None
        return slice(begin, begin + len(blocks))

    def _mask(self, places: Ints, keys: int, window: int | None) -> torch.Tensor:
        """Returns [T, keys] of 0 and -inf for tokens at these places among the keys: rows of one band, which
        is built once."""
        last = int(places.max())
        band = np.full(last + keys, -np.inf, dtype=np.float32)  # [last - place + key]
        band[max(0, last + 1 - window) if window else 0 : last + 1] = 0.0
        bands = uploaded(band, self.slots.device).to(self.mask_dtype).unfold(0, keys, 1)
        return bands.index_select(0, uploaded(last - places, self.slots.device))

    def _spans(self, begins: Ints, places: Ints, keys: int) -> torch.Tensor:
        """Returns [T, keys] of 0 and -inf for tokens that see the keys from a place on, up to their own."""
        key = np.arange(keys)
        seen = (key >= begins[:, None]) & (key <= places[:, None])
        mask = np.where(seen, np.float32(0.0), np.float32(-np.inf))
        return uploaded(mask, self.slots.device).to(self.mask_dtype)


def seen_from(positions: Ints, view: View) -> Ints:
    """Returns the first position that tokens at these see."""
    first = np.maximum(positions + 1 - view.window, 0) if view.window else np.zeros_like(positions)
    return first if view.chunk is None else np.maximum(first, positions // view.chunk * view.chunk)


def padded_keys(length: int, row_batching: RowBatching | None = None) -> int:
    """Keys to gather for a session of this length: few different sizes, at most a sixteenth too long beyond
    1,024, but for what the kernels ask for."""
    multiple = max(KEY_MULTIPLE, 1 << max(0, (length - 1).bit_length() - 5))
    keys = -(-length // multiple) * multiple
    return keys if row_batching is None else row_batching.padded(keys)


def build_step(
    works: Sequence[Work],
    *,
    block_size: int,
    scratch_block: int,
    device: torch.device,
    mask_dtype: torch.dtype,
    views: Iterable[View] | None,
    key_bytes: int = 0,
    row_batching: RowBatching | None = None,
) -> StepInputs:
    """Returns the step's index tensors. The scratch block stands for keys that pad a session.

    `views`: those of the layers, as far as they are known; None = no keys are brought together, and there are
    no groups. `key_bytes`: of a token's key and value in one layer; 0 where that is not known yet.
    `row_batching`: None = rows attend alone."""
    counts = np.array([len(work.tokens) for work in works], dtype=np.int64)  # [W]
    starts = np.array([work.start for work in works], dtype=np.int64)
    ends = starts + counts
    used, order, group_bounds, tiles = ends, np.arange(len(works)), list[int](), list[tuple[int, int]]()
    if views is not None:
        used = np.maximum(ends, [max(work.places, default=-1) + 1 for work in works])  # slots
        buckets = np.array([padded_keys(int(end), row_batching) for end in used], dtype=np.int64)
        order = np.lexsort((-counts, buckets))  # of the works: by group, then longest first
        group_bounds = [0, *(np.flatnonzero(np.diff(buckets[order])) + 1).tolist(), len(order)]
        tiles = _tiles(buckets[order].tolist(), group_bounds, key_bytes)

    lengths = counts[order]
    past = lengths.cumsum()  # end of each work's tokens, which run in that order
    positions = np.arange(past[-1]) - (past - ends[order]).repeat(lengths)
    flat = chain.from_iterable(works[index].tokens for index in order.tolist())
    tables = [np.array(work.blocks, dtype=np.int64) for work in works]  # copies: they may grow meanwhile
    first_block = np.array([0, *accumulate(map(len, tables))])
    end_of = np.empty_like(past)
    end_of[order] = past
    lasts = end_of.tolist()
    lying, branched = positions.copy(), dict[int, OnBranch]()  # where tokens stand
    for work, end in zip(works, lasts, strict=True):
        if work.parents:
            first = end - len(work.parents)
            branched |= put_on_branches(work.parents, work.places, first, positions, lying)
    places = Tables(np.concatenate(tables), first_block[order].repeat(lengths))
    slots = places.slots(lying, block_size)

    groups, token, each = [], 0, lengths.tolist()
    for low, high in pairwise(group_bounds):
        first_token, of_group = token, []
        for begin, end in tiles:
            if low <= begin < high:
                calls, token = _calls(each[begin:end], token, row_batching)
                of_group.append(Tile(slice(begin - low, end - low), calls))
        members = order[low:high]
        groups.append(
            Group(
                first_token,
                tuple(of_group),
                tuple(tables[member] for member in members),
                starts[members],
                used[members],
                counts[members],
                lying[first_token:token],
            )
        )

    keep = np.concatenate([np.arange(end - work.rows, end) for work, end in zip(works, lasts, strict=True)])
    rows = len(keep)

    tensor = partial(uploaded, device=device)
    inputs = StepInputs(
        tensor(np.fromiter(flat, np.int64, len(positions)))[None],
        tensor(positions)[None],
        tensor(slots),
        tensor(keep if rows else np.zeros(1, dtype=np.int64)),
        rows,
        tuple(groups),
        block_size,
        scratch_block,
        mask_dtype,
        row_batching,
        places,
        {},
        {},
        end_of,
    )
    inputs.on_branches = branched
    if moves := [pair for work in works for pair in work.moves]:
        sources, targets = np.array(moves).T
        inputs.moves = tensor(sources.copy()), tensor(targets.copy())
    for view in views or ():
        inputs.tiles(view)
    return inputs


def _tiles(buckets: Sequence[int], group_bounds: Sequence[int], key_bytes: int) -> list[tuple[int, int]]:
    """Groups cut into tiles: (first work, end)."""
    tiles = []
    for low, high in pairwise(group_bounds):
        most = max(1, TILE_BYTES // (buckets[low] * key_bytes)) if key_bytes else high - low
        tiles += [(begin, min(begin + most, high)) for begin in range(low, high, most)]
    return tiles


def _calls(
    counts: Sequence[int], token: int, row_batching: RowBatching | None
) -> tuple[tuple[AttentionCall, ...], int]:
    """Returns the attention calls of a tile whose sessions, longest first, have `counts` tokens, and the
    step's token after them."""
    calls, session = [], 0
    for count, run in groupby(counts):
        past = session + len(list(run))
        each = past - session if row_batching is not None or count == 1 else 1  # sessions in a call
        while session < past:
            calls.append(AttentionCall(slice(token, token + each * count), slice(session, session + each)))
            token, session = token + each * count, session + each
    return tuple(calls), token
