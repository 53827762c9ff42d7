"""Pieces of a session's keys, whose bounds follow from their positions, and sums over them that are added in
order: parts of the attention kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def piece_of(key, PIECE: tl.constexpr):
    """The piece that a key is in: its position as a number of three binary digits and an exponent."""
    unit = key // PIECE
    exponent = tl.maximum((unit.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 130, 0)
    return 8 * exponent + (unit >> exponent)


@triton.jit
def begin_of(piece, PIECE: tl.constexpr):
    """The first key of a piece."""
    exponent = tl.maximum(piece // 8 - 1, 0)
    return ((piece - 8 * exponent) << exponent) * PIECE


@triton.jit
def lowest_seen(position, window, stretch, STRETCHED: tl.constexpr):
    """The first key that a token at a position sees."""
    lowest = tl.where(window >= 0, tl.maximum(position - window, 0), 0)
    if STRETCHED:
        lowest = tl.maximum(lowest, position // stretch * stretch)
    return lowest


@triton.jit
def added(best, total, sums, more_best, more_total, more_sums):
    """A row's sums with those of one more piece. A piece in which it sees nothing changes no bit."""
    higher = tl.maximum(best, more_best)
    level = tl.where(higher == float("-inf"), 0.0, higher)  # where nothing has been seen yet
    old = tl.exp2(best - level)
    new = tl.exp2(more_best - level)
    return higher, total * old + more_total * new, sums * old[:, None] + more_sums * new[:, None]


@triton.jit
def divided(best, total, sums, sinks, query_head, real, SINKS: tl.constexpr, LOG2: tl.constexpr):
    """What a row's sums come to, with the score that no key gets."""
    if SINKS:
        sink = tl.load(sinks + query_head, mask=real, other=0.0).to(tl.float32) * LOG2
        higher = tl.maximum(best, sink)
        fade = tl.exp2(best - higher)
        total = total * fade + tl.exp2(sink - higher)
        sums = sums * fade[:, None]
    return sums / total[:, None]


@triton.jit
def part_kept(sums, bests, totals, at, column, there, real, wanted, WIDTH: tl.constexpr):
    """What was kept of one piece; where it is not wanted, that of a piece in which nothing is seen."""
    best = tl.load(bests + at, mask=real & wanted, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(totals + at, mask=real & wanted, other=0.0, cache_modifier=".cg")
    place = sums + at[:, None] * WIDTH + column[None, :]
    return best, total, tl.load(place, mask=there & wanted, other=0.0, cache_modifier=".cg")


@triton.jit
def all_parts(sums, bests, totals, at, step, count, column, there, real, WIDTH: tl.constexpr):
    """The sums of so many pieces, added in order; four of them are on their way at a time."""
    best, total, found = part_kept(sums, bests, totals, at, column, there, real, False, WIDTH)
    for some in range(0, count, 4):
        one = part_kept(sums, bests, totals, at, column, there, real, True, WIDTH)
        two = part_kept(sums, bests, totals, at + step, column, there, real, some + 1 < count, WIDTH)
        three = part_kept(sums, bests, totals, at + 2 * step, column, there, real, some + 2 < count, WIDTH)
        four = part_kept(sums, bests, totals, at + 3 * step, column, there, real, some + 3 < count, WIDTH)
        best, total, found = added(best, total, found, one[0], one[1], one[2])
        best, total, found = added(best, total, found, two[0], two[1], two[2])
        best, total, found = added(best, total, found, three[0], three[1], three[2])
        best, total, found = added(best, total, found, four[0], four[1], four[2])
        at += 4 * step
    return best, total, found
