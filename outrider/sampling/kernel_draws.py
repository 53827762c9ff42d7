"""Draws tokens by the kernels of triton_draws.py and its neighbours: what `draw` and `rank` give on a CPU.

The host asks for some operations and waits for none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

from outrider.sampling import triton_changes, triton_cuts, triton_draws
from outrider.sampling.packed_rows import Fields, Ids, PackedRows, Views, pack, places_of
from outrider.sampling.ranked import Ranked, ranked_of
from outrider.sampling.shaping import Row
from outrider.sampling.triton_draws import TILE
from outrider.uploading import uploaded


@dataclass(frozen=True, slots=True)
class Columns:
    """What logits [R, w] are of."""

    first: int  # id of the first one, of ids that follow one another
    width: int
    limit: torch.Tensor  # [1] int64: only ids below it are drawn
    ids: torch.Tensor | None = None  # [w] int64, rising, in place of `first`; then the first is always drawn

    @property
    def tiles(self) -> int:
        return max(1, -(-self.width // TILE))


@dataclass(frozen=True, slots=True)
class Drawn:
    """How rows are drawn, on their device: [n] each."""

    at: torch.Tensor  # int64: their places among the logits
    key: torch.Tensor  # int64, the bits of their noise's key
    temperature: torch.Tensor  # float64; 0 = the likeliest
    cut: torch.Tensor | None = None  # int64: the key of the last token that stays


def take(
    logits: torch.Tensor,
    parts: torch.Tensor,
    columns: Columns,
    source: torch.Tensor | None = None,
    at: torch.Tensor | None = None,
    mask_at: torch.Tensor | None = None,
    masks: torch.Tensor | None = None,
) -> None:
    """Sets what may not be drawn to -inf, in logits [R, w] float32 or in a copy of `source` [n, w] there, and
    leaves the keys of the best of each row's tiles in `parts` [R, tiles].

    `at`: only these rows [n] int64; of `masks` [m, bytes] uint8 each has that `mask_at` [n], or none."""
    count = len(at) if at is not None else len(logits if source is None else source)
    with _on(logits):
        triton_draws.take[(columns.tiles, count)](
            logits if source is None else source,
            logits,
            parts,
            masks,
            mask_at,
            at,
            columns.ids,
            columns.limit,
            columns.first,
            columns.width,
            0 if source is None else source.stride(0),
            logits.stride(0),
            0 if masks is None else masks.shape[1],
            columns.tiles,
            SOURCE=source is not None,
            ROWS=at is not None,
            NAMED=columns.ids is not None,
            MASKED=masks is not None,
            TILE=TILE,
        )


def best(
    parts: torch.Tensor, out: torch.Tensor, at: torch.Tensor | None = None, *, keys: bool = False
) -> None:
    """Leaves the id, or the key, of the best of each row's keys [n, p] in `out` [R] int64, `at` these rows or
    in order."""
    with _on(parts):
        triton_draws.merge[(len(parts),)](
            parts,
            at,
            out,
            parts.shape[1],
            PADDED=triton.next_power_of_2(parts.shape[1]),
            ROWS=at is not None,
            KEYS=keys,
        )


def score(
    logits: torch.Tensor, parts: torch.Tensor, columns: Columns, drawn: Drawn, count: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the keys of the best log p' + noise of each tile, given the keys of the rows' best logits
    [R, p]: [n, tiles]. With a `count`, of so many [n, tiles, count], and the sums of exp of all of them
    [n, tiles], for rows whose likeliest token is wanted, too."""
    rows, tiles = len(drawn.at), columns.tiles
    found = parts.new_empty((rows, tiles, count) if count else (rows, tiles))
    sums = logits.new_empty((rows, tiles if count else 0))
    with _on(logits):
        triton_draws.score[(tiles, rows)](
            logits,
            parts,
            drawn.at,
            drawn.key,
            drawn.temperature,
            drawn.cut,
            columns.ids,
            columns.limit,
            found,
            sums,
            columns.first,
            columns.width,
            logits.stride(0),
            parts.shape[1],
            tiles,
            PADDED=triton.next_power_of_2(parts.shape[1]),
            CUT=drawn.cut is not None,
            NAMED=columns.ids is not None,
            COUNT=max(count, 1),
            SHARES=count > 0,
            TILE=TILE,
            num_warps=triton_draws.WARPS,
        )
    return found, sums


def rank_into(
    out: torch.Tensor, logits: torch.Tensor, parts: torch.Tensor, columns: Columns, drawn: Drawn
) -> None:
    """Leaves the best ids of each row and the bits of their float32 shares in `out` [n, 2, count] int32."""
    count = out.shape[2]
    found, sums = score(logits, parts, columns, drawn, count)
    with _on(logits):
        triton_draws.merge_shares[(len(found),)](
            found,
            sums,
            columns.ids,
            out,
            columns.tiles,
            NAMED=columns.ids is not None,
            COUNT=count,
            PADDED=triton.next_power_of_2(columns.tiles),
            WIDE=triton.next_power_of_2(columns.tiles * count),
        )


def change(
    logits: torch.Tensor, parts: torch.Tensor, columns: Columns, packed: PackedRows, views: Views
) -> None:
    """Applies penalties, biases and grammars to rows of logits [R, w], in place, and leaves the keys of the
    best of their tiles in `parts` [R, tiles]."""
    fields, ids, numbers, masks = views
    where = (ids, numbers, columns.width, logits.stride(0))
    with _on(logits):
        if packed.most_committed >= 0:
            triton_changes.penalize[_blocks(packed.most_committed, packed.rows)](
                logits,
                fields.at,
                fields.committed_first,
                fields.committed_count,
                fields.drafted_first,
                fields.drafted_count,
                fields.factor,
                *where,
                ENTRIES=triton_changes.ENTRIES,
                enable_fp_fusion=False,  # a product and a difference are rounded apart, as on a CPU
            )
        if packed.most_biases:
            triton_changes.add_biases[_blocks(packed.most_biases, packed.rows)](
                logits,
                fields.at,
                fields.bias_first,
                fields.bias_count,
                *where,
                ENTRIES=triton_changes.ENTRIES,
            )
    mask_at = fields.mask if packed.masks else None
    take(logits, parts, columns, None, fields.at, mask_at, masks if packed.masks else None)


def cut(
    logits: torch.Tensor,
    parts: torch.Tensor,
    columns: Columns,
    fields: Fields,
    *,
    top_k: bool = True,
    top_p: bool = True,
) -> Drawn:
    """Returns how rows are drawn, with what top_k and top_p, where any may have it, and min_p leave."""
    rows, counted = len(fields.at), len(fields.at) if top_k or top_p else 0
    tables = parts.new_zeros(counted, 2, triton_cuts.PARTS, triton_cuts.BINS.value)
    states = parts.new_empty(counted, 2, 3)
    cuts = parts.new_empty(rows)
    cut_by = (fields.top_k, fields.top_p)
    what = (logits, parts, fields.at, fields.temperature, *cut_by)
    found = (columns.ids, columns.limit, tables, states)
    where = (columns.first, columns.width, logits.stride(0), parts.shape[1])
    how = {
        "PADDED": triton.next_power_of_2(parts.shape[1]),
        "NAMED": columns.ids is not None,
        "TILE": triton_cuts.TILE,
        "num_warps": triton_cuts.WARPS,
    }
    tiles = triton.cdiv(columns.width, triton_cuts.TILE)
    with _on(logits):
        for mass in [each for each, wanted in ((0, top_k), (1, top_p)) if wanted]:
            for part in range(triton_cuts.PARTS):
                triton_cuts.count_part[(tiles, rows)](*what, *found, *where, MASS=mass, PART=part, **how)
                triton_cuts.narrow[(rows,)](
                    *cut_by, tables, states, MASS=mass, PART=part, BINS=triton_cuts.BINS.value
                )
        triton_cuts.find_cut[(rows,)](*what, fields.floor, *found, cuts, *where, **how)
    return Drawn(fields.at, fields.key, fields.temperature, cuts)


def draw(logits: torch.Tensor, rows: Sequence[Row], vocab_size: int) -> torch.Tensor:
    """Returns what sampler.draw does, for logits [R, V] float32, on their device."""
    work, parts, columns, drawn, _ = _shaped(logits, rows, vocab_size, None)
    tokens = parts.new_empty(len(rows))
    best(score(work, parts, columns, drawn)[0], tokens)
    return tokens


def rank(
    logits: torch.Tensor, rows: Sequence[Row], count: int, vocab_size: int, vocabulary: torch.Tensor | None
) -> list[Ranked]:
    """Returns what sampler.rank does. The host waits for it."""
    work, parts, columns, drawn, packed = _shaped(logits, rows, vocab_size, vocabulary)
    out = torch.empty(len(rows), 2, count, dtype=torch.int32, device=logits.device)
    rank_into(out, work, parts, columns, drawn)
    return ranked_of(out.cpu().numpy(), min(count, packed.ids))


def _shaped(
    logits: torch.Tensor, rows: Sequence[Row], vocab_size: int, vocabulary: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, Columns, Drawn, PackedRows]:
    device, width = logits.device, logits.shape[1]
    ids, places = (None, None) if vocabulary is None else _named(vocabulary, device)
    packed = pack(rows, range(len(rows)), width, vocab_size, places)
    views = packed.views(uploaded(packed.buffer, device))
    fields = views[0]
    columns = Columns(0, width, fields.limit, ids)
    parts = torch.empty(len(rows), columns.tiles, dtype=torch.int64, device=device)
    work = torch.empty(logits.shape, dtype=torch.float32, device=device)
    take(work, parts, columns, logits)
    if packed.changed:
        change(work, parts, columns, packed, views)
    drawn = Drawn(fields.at, fields.key, fields.temperature)
    if packed.cut:
        drawn = cut(work, parts, columns, fields, top_k=packed.top_k, top_p=packed.top_p)
    return work, parts, columns, drawn, packed


@lru_cache(maxsize=4)
def _named(vocabulary: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Ids]:
    return vocabulary.to(device), places_of(vocabulary)


def _blocks(entries: int, rows: int) -> tuple[int, int]:
    return max(1, triton.cdiv(entries, triton_changes.ENTRIES)), rows


def _on(tensor: torch.Tensor) -> torch.cuda.device_of:
    """Triton launches on the current device."""
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]
