"""Attention over a paged pool as a Triton kernel.

A program takes one head of keys and a few tokens of one session, together with all query heads that share
that head of keys, so that each key is read once for all of them. The softmax runs along the keys as they come
(Dao et al., "FlashAttention", 2022).

Keys are summed in pieces whose bounds follow from their positions alone, and the pieces are added in order.
So a token gets the same bits whoever adds them: one program that goes through all pieces, or a program for
each piece of which the last to end adds up what all have found ("Flash-Decoding"). Which it is depends on how
much the step has for the device to do. A compiler that contracts a product and a sum into one operation may
do so in one way and not in the other, so it is told not to.

A fixed number of programs share out what there is to do, since a recorded step has room for more than it
mostly has.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from outrider.engine.attention import LayerAttention
from outrider.engine.attention_kernel import WIDEST, Kernel
from outrider.engine.flat_inputs import FlatInputs
from outrider.engine.triton_pieces import added, all_parts, begin_of, divided, lowest_seen, piece_of

BLOCK_SIZE = 64
PIECE = 256  # keys of the first pieces; later ones have an eighth of what stands before them, rounded down
# Rows of a program, tokens times query heads: the least that the matrix units take, and more where sessions
# may bring more. Warps stand side by side along the keys in both cases, so a row's sums have the same order.
ROWS = 16
MORE_ROWS = 32
PROGRAMS = 3  # that run side by side on each of a GPU's multiprocessors
MOST_PROGRAMS = 16  # of each, where a step has so many tokens that they follow one another
SHARES = 0.7  # of a step, for each of those side by side: who has more keys than one shares them out
KEPT_ROWS = 2**16  # of pieces' sums, kept until they are added: 34 MB where values are 128 wide
WARPS = 4
STAGES = 3  # in which keys are on their way; 2 where rows are longer than WIDE bytes
WIDE = 256
REGISTERS = 168  # of a thread: with these, as many programs fit on a multiprocessor as with its other memory
LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["sessions", "pages", "window", "stretch", "most_parts", "shares"])
def _attend(
    query,
    keys,
    values,
    out,
    sinks,  # [Hq]; anything where there are none
    sums_room,  # [parts, ROWS, Dv] float32
    bests_room,  # [parts, ROWS] float32
    totals_room,
    arrivals,  # [parts] int32, zeros between two launches
    query_ends,
    keys_used,
    tables,
    sessions,
    pages,  # of a table
    scale,  # of the scores, in units of log2
    cap,  # of the scores, in the same units
    window,  # keys that a token sees before its own; -1 = all
    stretch,  # a token sees nothing before the last multiple of it
    query_token,
    query_head,  # strides
    key_block,
    key_token,
    key_head,
    value_block,
    value_token,
    value_head,
    most_parts,  # of a head
    shares,  # of what there is to do for a head: keys of a token that has more than one are shared out
    BLOCK: tl.constexpr,  # keys of a block
    PIECE: tl.constexpr,
    SESSIONS: tl.constexpr,  # their number's next power of two
    HEADS: tl.constexpr,  # of keys
    SHARED: tl.constexpr,  # query heads that share a head of keys
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,  # the width's next power of two
    VALUE_WIDTH: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    CAPPED: tl.constexpr,
    STRETCHED: tl.constexpr,
    SINKS: tl.constexpr,
    LOG2: tl.constexpr,
) -> None:
    TOKENS: tl.constexpr = ROWS // SHARED  # of a run, which a program takes at a time

    # What there is to do: of each session runs of tokens, or runs times workers where keys are shared out.
    entry = tl.arange(0, SESSIONS)
    firsts = tl.load(query_ends + entry, mask=entry < sessions, other=0)
    counts = tl.load(query_ends + entry + 1, mask=entry < sessions, other=0) - firsts
    all_used = tl.load(keys_used + entry, mask=entry < sessions, other=0)
    runs = tl.cdiv(counts, TOKENS)
    lowest = lowest_seen(tl.maximum(all_used - counts, 0), window, stretch, STRETCHED)
    span = tl.cdiv(all_used - lowest, BLOCK)
    pieces = piece_of(tl.maximum(all_used - 1, 0), PIECE) - piece_of(lowest, PIECE) + 1
    share = tl.maximum(tl.sum(runs * span, 0) // shares, 1)
    workers = tl.minimum(tl.cdiv(span, share), pieces)
    parts = tl.where(workers > 1, runs * pieces, 0)
    part_ends = tl.cumsum(parts, 0)
    shared_out = (parts > 0) & (part_ends <= most_parts)
    items = tl.where(shared_out, runs * workers, runs)
    ends = tl.cumsum(items, 0)

    for turn in range(tl.program_id(0), tl.sum(items, 0) * HEADS, tl.num_programs(0)):
        head = turn % HEADS
        item = turn // HEADS
        session = tl.sum((ends <= item).to(tl.int32), 0)
        here = entry == session
        item -= tl.sum(tl.where(here, ends - items, 0), 0)
        together = tl.sum(tl.where(here & shared_out, workers, 0), 0)  # that share a run's keys, or 0
        first_part = tl.sum(tl.where(here, part_ends - parts, 0), 0)
        run_parts = tl.sum(tl.where(here, pieces, 0), 0)
        first = tl.load(query_ends + session)
        count = tl.load(query_ends + session + 1) - first
        used = tl.load(keys_used + session)
        before = used - count
        session_runs = tl.cdiv(count, TOKENS)
        run = item % session_runs
        worker = item // session_runs

        row = tl.arange(0, ROWS)
        index = run * TOKENS + row // SHARED  # of the token in its session
        real = (row < TOKENS * SHARED) & (index < count)
        position = before + index
        seen_from = lowest_seen(position, window, stretch, STRETCHED)
        column = tl.arange(0, PADDED)
        value_column = tl.arange(0, VALUE_PADDED)
        of_head = head * SHARED + row % SHARED
        place = (first + index) * query_token + of_head * query_head
        q = tl.load(
            query + place[:, None] + column[None, :],
            mask=real[:, None] & (column < WIDTH)[None, :],
            other=0.0,
        )

        begin = lowest_seen(before + run * TOKENS, window, stretch, STRETCHED) // BLOCK
        end = tl.cdiv(before + tl.minimum(run * TOKENS + TOKENS, count), BLOCK)
        first_piece = piece_of(begin * BLOCK, PIECE)
        run_pieces = piece_of(end * BLOCK - 1, PIECE) - first_piece + 1
        from_key = lowest_seen(before, window, stretch, STRETCHED)
        group = first_part + run * run_parts  # of what is kept
        first_part = group - piece_of(from_key, PIECE)  # of piece 0, if there were one
        if together > 0:
            own = piece_of(from_key + (used - from_key) * worker // together, PIECE)
            others = piece_of(from_key + (used - from_key) * (worker + 1) // together, PIECE)
            begin = tl.maximum(begin, begin_of(own, PIECE) // BLOCK)
            if worker + 1 < together:
                end = tl.minimum(end, begin_of(others, PIECE) // BLOCK)
        there = real[:, None] & (value_column < VALUE_WIDTH)[None, :]
        all_best = tl.full([ROWS], float("-inf"), tl.float32)
        all_total = tl.zeros([ROWS], tl.float32)
        all_sums = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
        offset = tl.arange(0, BLOCK)
        table = tables + session * pages
        piece = piece_of(begin * BLOCK, PIECE)
        # All pieces one after another; or each on its own, if others add them.
        times = tl.where(together > 0, piece_of(end * BLOCK - 1, PIECE) - piece + 1, 1)
        for each in range(piece, piece + times):
            low, high = begin, end
            if together > 0:
                low = tl.maximum(begin, begin_of(each, PIECE) // BLOCK)
                high = tl.minimum(end, begin_of(each + 1, PIECE) // BLOCK)
                all_best = tl.full([ROWS], float("-inf"), tl.float32)
                all_total = tl.zeros([ROWS], tl.float32)
                all_sums = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
            edge = begin_of(piece_of(low * BLOCK, PIECE) + 1, PIECE) // BLOCK
            best = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            sums = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
            next_block = tl.load(table + low, mask=low < high, other=0)
            for page in range(low, high):
                block = next_block.to(tl.int64)
                next_block = tl.load(table + page + 1, mask=page + 1 < high, other=0)
                key = page * BLOCK + offset
                inside = (key < used)[:, None]
                key_place = (
                    block * key_block + head * key_head + offset[:, None] * key_token + column[None, :]
                )
                k = tl.load(keys + key_place, mask=inside & (column < WIDTH)[None, :], other=0.0)
                value_place = block * value_block + head * value_head + offset[:, None] * value_token
                v = tl.load(
                    values + value_place + value_column[None, :],
                    mask=inside & (value_column < VALUE_WIDTH)[None, :],
                    other=0.0,
                )
                scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
                if CAPPED:  # tanh x = 1 - 2 / (e^2x + 1)
                    scores = (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2 / cap)) + 1.0)) * cap
                seen = (key[None, :] <= position[:, None]) & (key[None, :] >= seen_from[:, None])
                scores = tl.where(seen, scores, float("-inf"))
                higher = tl.maximum(best, tl.max(scores, 1))
                level = tl.where(higher == float("-inf"), 0.0, higher)
                weights = tl.exp2(scores - level[:, None])
                fade = tl.exp2(best - level)
                total = total * fade + tl.sum(weights, 1)
                sums = tl.dot(weights.to(v.dtype), v, acc=sums * fade[:, None], input_precision="ieee")
                best = higher
                if (page + 1 == edge) | (page + 1 == high):
                    all_best, all_total, all_sums = added(all_best, all_total, all_sums, best, total, sums)
                    best = tl.full([ROWS], float("-inf"), tl.float32)
                    total = tl.zeros([ROWS], tl.float32)
                    sums = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
                    edge = begin_of(piece_of((page + 1) * BLOCK, PIECE) + 1, PIECE) // BLOCK
            if together > 0:
                at = ((first_part + each) * HEADS + head) * ROWS + row
                tl.store(sums_room + at[:, None] * VALUE_WIDTH + value_column[None, :], all_sums, mask=there)
                tl.store(bests_room + at, all_best, mask=real)
                tl.store(totals_room + at, all_total, mask=real)

        out_row = (first + index) * (HEADS * SHARED) + of_head
        out_place = out_row[:, None] * VALUE_WIDTH + value_column[None, :]
        if together == 0:
            found = divided(all_best, all_total, all_sums, sinks, of_head, real, SINKS, LOG2)
            tl.store(out + out_place, found.to(out.dtype.element_ty), mask=there)
        else:
            tl.debug_barrier()  # all of this program's threads have written
            if tl.atomic_add(arrivals + group * HEADS + head, 1, sem="acq_rel") == together - 1:
                all_best, all_total, all_sums = all_parts(
                    sums_room,
                    bests_room,
                    totals_room,
                    ((first_part + first_piece) * HEADS + head) * ROWS + row,
                    HEADS * ROWS,
                    run_pieces,
                    value_column,
                    there,
                    real,
                    VALUE_WIDTH,
                )
                found = divided(all_best, all_total, all_sums, sinks, of_head, real, SINKS, LOG2)
                tl.store(out + out_place, found.to(out.dtype.element_ty), mask=there)
                tl.store(arrivals + group * HEADS + head, 0)


def triton_attention(
    query: torch.Tensor,  # [T, Hq, D]
    keys: torch.Tensor,  # [blocks, block_size, Hkv, D]
    values: torch.Tensor,  # [blocks, block_size, Hkv, Dv]
    inputs: FlatInputs,
    how: LayerAttention,
    sinks: torch.Tensor | None,  # [Hq]
    room: dict[Any, Any],
) -> torch.Tensor:
    """As Kernel's: [T, Hq, Dv]."""
    if query.stride(2) != 1:
        query = query.contiguous()
    heads, shared, value_width = keys.shape[2], how.sharing, values.shape[3]
    rows = max(ROWS if inputs.longest * shared <= ROWS else MORE_ROWS, triton.next_power_of_2(shared))
    multiprocessors = _multiprocessors(query.device)
    at_once = PROGRAMS * multiprocessors
    programs = max(at_once, min(MOST_PROGRAMS * multiprocessors, len(query) * heads // 2))
    out = query.new_empty(query.shape[0], how.query_heads, value_width)
    on_its_device = torch.cuda.device_of(query)  # type: ignore[no-untyped-call]
    with on_its_device:  # Triton launches on the current one
        _attend[(programs,)](
            query,
            keys,
            values,
            out,
            query if sinks is None else sinks,
            *_room(room, query.device, value_width),
            inputs.query_ends,
            inputs.keys,
            inputs.tables,
            len(inputs.keys),
            inputs.tables.stride(0),
            how.scale * LOG2_E,
            (how.softcap or 1.0) * LOG2_E,
            -1 if how.window is None else how.window - 1,
            how.chunk or 1,
            query.stride(0),
            query.stride(1),
            *keys.stride()[:3],
            *values.stride()[:3],
            KEPT_ROWS // rows // heads,
            max(1, int(SHARES * at_once) // heads),
            BLOCK=keys.shape[1],
            PIECE=PIECE,
            SESSIONS=_filled(len(inputs.keys)),
            HEADS=heads,
            SHARED=shared,
            ROWS=rows,
            WIDTH=how.width,
            PADDED=max(16, triton.next_power_of_2(how.width)),
            VALUE_WIDTH=value_width,
            VALUE_PADDED=max(16, triton.next_power_of_2(value_width)),
            CAPPED=how.softcap is not None,
            STRETCHED=how.chunk is not None,
            SINKS=sinks is not None,
            LOG2=LOG2_E,
            **_effort(max(how.width, value_width) * keys.element_size(), rows),
        )
    return out


def _filled(sessions: int) -> int:
    """Returns one of a few powers of two, for each of which the kernel is compiled."""
    found: int = next((size for size in (16, 64) if size >= sessions), 0)
    return found or triton.next_power_of_2(max(512, sessions))


def _effort(bytes_of_row: int, rows: int) -> dict[str, int | None]:
    """Returns how the kernel is compiled, by the size of a key or value and a program's rows."""
    wide = bytes_of_row > WIDE
    return {
        "num_warps": WARPS,
        "num_stages": 2 if wide else STAGES,
        "maxnreg": None if wide or rows > ROWS else REGISTERS,
        "enable_fp_fusion": False,
    }


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _room(room: dict[Any, Any], device: torch.device, width: int) -> tuple[torch.Tensor, ...]:
    """Returns where the sums of pieces are kept, made once for all layers that are alike."""
    found: tuple[torch.Tensor, ...] | None = room.get(width)
    if found is None:
        sums = torch.empty(KEPT_ROWS, width, dtype=torch.float32, device=device)
        bests, totals = torch.empty(2, KEPT_ROWS, dtype=torch.float32, device=device)
        arrivals = torch.zeros(KEPT_ROWS // ROWS, dtype=torch.int32, device=device)
        found = room[width] = sums, bests, totals, arrivals
    return found


def _obstacle(how: LayerAttention, dtype: torch.dtype) -> str | None:
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"they do not compute in {str(dtype).removeprefix('torch.')}"
    if max(how.width, how.value_width) > WIDEST or how.width % 8 or how.value_width % 8:
        return f"they take no heads of width {how.width}"
    if dtype == torch.float32 and max(how.width, how.value_width) > 128:
        return f"they take no heads of width {how.width} in float32"
    return None


KERNEL = Kernel("triton", BLOCK_SIZE, triton_attention, _obstacle)
