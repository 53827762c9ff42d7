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
from outrider.engine.triton_rows import stored

BLOCK_SIZE = 64
PIECE = (
    256  # keys of the first pieces; each is an eighth of what stands before it, rounded down, if that is more
)
# Rows of a program, tokens times query heads: the least that the matrix units take, and more where sessions
# bring more. Warps stand side by side along the keys in both cases, so a row's sums have the same order.
ROWS = 16
MORE_ROWS = 32
PROGRAMS = 4  # on each of a GPU's multiprocessors
SHARES = 0.5  # of a step, for each program
KEPT_ROWS = 2**16  # of pieces' sums, kept until they are added: 34 MB where values are 128 wide
WARPS = 4
STAGES = 3  # in which keys are on their way; 2 where rows are longer than WIDE bytes
WIDE = 256
REGISTERS = 168  # of a thread: with these, as many programs fit on a multiprocessor as with its other memory
LOG2_E = 1.4426950408889634


@triton.jit
def _piece_of(key, PIECE: tl.constexpr):
    """The piece that a key is in: its position as a number of three binary digits and an exponent."""
    unit = key // PIECE
    exponent = tl.maximum((unit.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 130, 0)
    return 8 * exponent + (unit >> exponent)


@triton.jit
def _begin_of(piece, PIECE: tl.constexpr):
    """The first key of a piece."""
    exponent = tl.maximum(piece // 8 - 1, 0)
    return ((piece - 8 * exponent) << exponent) * PIECE


@triton.jit
def _lowest(position, window, stretch, STRETCHED: tl.constexpr):
    """The first key that a token at a position sees."""
    lowest = tl.where(window >= 0, tl.maximum(position - window, 0), 0)
    if STRETCHED:
        lowest = tl.maximum(lowest, position // stretch * stretch)
    return lowest


@triton.jit
def _added(best, total, sums, more_best, more_total, more_sums):
    """A row's sums with those of one more piece. A piece in which it sees nothing changes no bit."""
    higher = tl.maximum(best, more_best)
    level = tl.where(higher == float("-inf"), 0.0, higher)  # where nothing has been seen yet
    old = tl.exp2(best - level)
    new = tl.exp2(more_best - level)
    return higher, total * old + more_total * new, sums * old[:, None] + more_sums * new[:, None]


@triton.jit
def _divided(best, total, sums, sinks, query_head, real, SINKS: tl.constexpr, LOG2: tl.constexpr):
    """What a row's sums come to, with the score that no key gets."""
    if SINKS:
        sink = tl.load(sinks + query_head, mask=real, other=0.0).to(tl.float32) * LOG2
        higher = tl.maximum(best, sink)
        fade = tl.exp2(best - higher)
        total = total * fade + tl.exp2(sink - higher)
        sums = sums * fade[:, None]
    return sums / total[:, None]


@triton.jit
def _part(sums, bests, totals, at, column, there, real, wanted, WIDTH: tl.constexpr):
    """What was kept of one piece; where it is not wanted, that of a piece in which nothing is seen."""
    best = tl.load(bests + at, mask=real & wanted, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(totals + at, mask=real & wanted, other=0.0, cache_modifier=".cg")
    place = sums + at[:, None] * WIDTH + column[None, :]
    return best, total, tl.load(place, mask=there & wanted, other=0.0, cache_modifier=".cg")


@triton.jit
def _all_parts(sums, bests, totals, at, step, count, column, there, real, WIDTH: tl.constexpr):
    """The sums of so many pieces, added in order; four of them are on their way at a time."""
    best, total, added = _part(sums, bests, totals, at, column, there, real, False, WIDTH)
    for some in range(0, count, 4):
        one = _part(sums, bests, totals, at, column, there, real, True, WIDTH)
        two = _part(sums, bests, totals, at + step, column, there, real, some + 1 < count, WIDTH)
        three = _part(sums, bests, totals, at + 2 * step, column, there, real, some + 2 < count, WIDTH)
        four = _part(sums, bests, totals, at + 3 * step, column, there, real, some + 3 < count, WIDTH)
        best, total, added = _added(best, total, added, one[0], one[1], one[2])
        best, total, added = _added(best, total, added, two[0], two[1], two[2])
        best, total, added = _added(best, total, added, three[0], three[1], three[2])
        best, total, added = _added(best, total, added, four[0], four[1], four[2])
        at += 4 * step
    return best, total, added


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

    # What there is to do: of each session runs of tokens, or runs times pieces where these are shared out.
    entry = tl.arange(0, SESSIONS)
    firsts = tl.load(query_ends + entry, mask=entry < sessions, other=0)
    counts = tl.load(query_ends + entry + 1, mask=entry < sessions, other=0) - firsts
    all_used = tl.load(keys_used + entry, mask=entry < sessions, other=0)
    runs = tl.cdiv(counts, TOKENS)
    lowest = _lowest(tl.maximum(all_used - counts, 0), window, stretch, STRETCHED)
    span = tl.cdiv(all_used - lowest, BLOCK)
    pieces = _piece_of(tl.maximum(all_used - 1, 0), PIECE) - _piece_of(lowest, PIECE) + 1
    share = tl.sum(runs * span, 0) // shares
    parts = tl.where((pieces > 1) & (span > share), runs * pieces, 0)
    part_ends = tl.cumsum(parts, 0)
    shared_out = (parts > 0) & (part_ends <= most_parts)
    items = tl.where(shared_out, parts, runs)
    ends = tl.cumsum(items, 0)

    for turn in range(tl.program_id(0), tl.sum(items, 0) * HEADS, tl.num_programs(0)):
        head = turn % HEADS
        item = turn // HEADS
        session = tl.sum((ends <= item).to(tl.int32), 0)
        here = entry == session
        item -= tl.sum(tl.where(here, ends - items, 0), 0)
        together = tl.sum(tl.where(here & shared_out, pieces, 0), 0)  # programs that share a run's keys, or 0
        first_part = tl.sum(tl.where(here, part_ends - parts, 0), 0)
        first = tl.load(query_ends + session)
        count = tl.load(query_ends + session + 1) - first
        used = tl.load(keys_used + session)
        before = used - count
        session_runs = tl.cdiv(count, TOKENS)
        run = item % session_runs
        piece = item // session_runs

        row = tl.arange(0, ROWS)
        index = run * TOKENS + row // SHARED  # of the token in its session
        real = (row < TOKENS * SHARED) & (index < count)
        position = before + index
        seen_from = _lowest(position, window, stretch, STRETCHED)
        column = tl.arange(0, PADDED)
        value_column = tl.arange(0, VALUE_PADDED)
        of_head = head * SHARED + row % SHARED
        place = (first + index) * query_token + of_head * query_head
        q = tl.load(
            query + place[:, None] + column[None, :],
            mask=real[:, None] & (column < WIDTH)[None, :],
            other=0.0,
        )

        begin = _lowest(before + run * TOKENS, window, stretch, STRETCHED) // BLOCK
        end = tl.cdiv(before + tl.minimum(run * TOKENS + TOKENS, count), BLOCK)
        if together > 0:
            mine = _piece_of(_lowest(before, window, stretch, STRETCHED), PIECE) + piece
            begin = tl.maximum(begin, _begin_of(mine, PIECE) // BLOCK)
            end = tl.minimum(end, _begin_of(mine + 1, PIECE) // BLOCK)
        edge = _begin_of(_piece_of(begin * BLOCK, PIECE) + 1, PIECE) // BLOCK

        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
        all_best = tl.full([ROWS], float("-inf"), tl.float32)
        all_total = tl.zeros([ROWS], tl.float32)
        all_sums = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
        offset = tl.arange(0, BLOCK)
        table = tables + session * pages
        next_block = tl.load(table + begin, mask=begin < end, other=0)
        for page in range(begin, end):
            block = next_block.to(tl.int64)
            next_block = tl.load(table + page + 1, mask=page + 1 < end, other=0)
            key = page * BLOCK + offset
            inside = (key < used)[:, None]
            key_place = block * key_block + head * key_head + offset[:, None] * key_token + column[None, :]
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
            if (page + 1 == edge) | (page + 1 == end):
                all_best, all_total, all_sums = _added(all_best, all_total, all_sums, best, total, sums)
                best = tl.full([ROWS], float("-inf"), tl.float32)
                total = tl.zeros([ROWS], tl.float32)
                sums = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
                edge = _begin_of(_piece_of((page + 1) * BLOCK, PIECE) + 1, PIECE) // BLOCK

        there = real[:, None] & (value_column < VALUE_WIDTH)[None, :]
        out_place = ((first + index) * (HEADS * SHARED) + of_head)[:, None] * VALUE_WIDTH + value_column[
            None, :
        ]
        if together == 0:
            found = _divided(all_best, all_total, all_sums, sinks, of_head, real, SINKS, LOG2)
            tl.store(out + out_place, found.to(out.dtype.element_ty), mask=there)
        else:
            group = (first_part + run * together) * HEADS + head
            at = (group + piece * HEADS) * ROWS + row
            tl.store(sums_room + at[:, None] * VALUE_WIDTH + value_column[None, :], all_sums, mask=there)
            tl.store(bests_room + at, all_best, mask=real)
            tl.store(totals_room + at, all_total, mask=real)
            tl.debug_barrier()  # all of this program's threads have written
            if tl.atomic_add(arrivals + group, 1, sem="acq_rel") == together - 1:
                all_best, all_total, all_sums = _all_parts(
                    sums_room,
                    bests_room,
                    totals_room,
                    group * ROWS + row,
                    HEADS * ROWS,
                    together,
                    value_column,
                    there,
                    real,
                    VALUE_WIDTH,
                )
                found = _divided(all_best, all_total, all_sums, sinks, of_head, real, SINKS, LOG2)
                tl.store(out + out_place, found.to(out.dtype.element_ty), mask=there)
                tl.store(arrivals + group, 0)


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
    programs = PROGRAMS * _multiprocessors(query.device)
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
            max(1, int(SHARES * programs) // heads),
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
    found: int = next((size for size in (16, 64, 256) if size >= sessions), 0)
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


KERNEL = Kernel("triton", BLOCK_SIZE, triton_attention, _obstacle, store=stored)
