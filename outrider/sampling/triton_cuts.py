"""The kernels that find which tokens top_k, top_p and min_p keep, without a sort and without the host.

log p' are at most 0, so the 31 bits of a number's magnitude order them. They are looked at in three parts:
how many tokens, or how much of the mass, each value of the upper bits has; then of the next ones, among
tokens that share the upper bits; then of the last. Mass is counted in whole units, which come to the same sum
in any order: a row's tokens do not depend on what else is drawn.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.sampling.triton_draws import HIGHEST, NOTHING, key_of, row_of, shaped_of

BITS = tl.constexpr(10)  # of the second part and the third; the first has one more
TWICE = tl.constexpr(20)
LOWEST = tl.constexpr(2**10 - 1)  # the bits of one
BINS = tl.constexpr(2**11)  # of a part
PARTS = 3
TILE = 4096  # ids of a program, which also looks through the bins
WARPS = 8
UNIT = tl.constexpr(2.0**44)  # units of the likeliest token's mass; 2**18 such tokens are below 2**63


@triton.jit
def mass_of(shaped):
    """Returns exp, in whole units."""
    return (tl.exp(shaped.to(tl.float64)) * UNIT + 0.5).to(tl.int64)


@triton.jit
def magnitude_of(shaped):
    return shaped.to(tl.int32, bitcast=True) & HIGHEST


@triton.jit
def limit_in(table, wanted):
    """Returns the first bin with which `wanted` is reached, and what the bins before it have together."""
    place = tl.arange(0, BINS)
    bins = tl.load(table + place)
    found = tl.sum((tl.cumsum(bins, 0) < wanted).to(tl.int32), 0)
    return found, tl.sum(tl.where(place < found, bins, 0), 0)


@triton.jit
def kth_of(table, k):
    """Returns the magnitude of the k-th likeliest token, from the counts of all three parts."""
    first, before = limit_in(table, k)
    second, more = limit_in(table + BINS, k - before)
    third, _ = limit_in(table + 2 * BINS, k - before - more)
    return (first << TWICE) | (second << BITS) | third


@triton.jit
def last_of(magnitude):
    """Returns the key of a number of this magnitude that all tokens with as much reach."""
    return key_of(-(magnitude.to(tl.float32, bitcast=True)), tl.full([], HIGHEST, tl.int32))


@triton.jit
def wanted_mass(table, top_p):
    """Returns of how much mass before it a token is ruled out, from that of the first part's bins."""
    total = tl.sum(tl.load(table + tl.arange(0, BINS)), 0)
    return tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)


@triton.jit
def count_part(
    logits,
    parts,  # of each row of logits: the best of its tiles
    rows,  # int64
    temperatures,  # float64
    top_ks,  # int64; 0 = off
    top_ps,  # float64; 1 = off
    ids_of,
    limit_at,
    tables,  # int64 of each row: counts and masses, [2, 3, BINS]
    first,
    width,
    stride,
    count,
    PADDED: tl.constexpr,
    MASS: tl.constexpr,  # whether for top_p, or for top_k
    PART: tl.constexpr,
    NAMED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Adds what a tile's tokens have to the bins of a part."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.load(rows + row)
    temperature = tl.load(temperatures + row).to(tl.float32)
    k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    counts = tables + row * 6 * BINS
    table = counts
    wanted_here = (temperature > 0) & (k > 0)
    if MASS:
        table = counts + 3 * BINS
        wanted_here = (temperature > 0) & (top_p < 1)
    if wanted_here:
        _place, _inside, allowed, _ids, value, most, _best = row_of(
            logits + at * stride,
            parts + at * count,
            count,
            ids_of,
            tl.load(limit_at),
            first,
            width,
            tl.program_id(0),
            NAMED,
            PADDED,
            TILE,
        )
        shaped = shaped_of(value, most, temperature)
        magnitude = magnitude_of(shaped)
        member = allowed
        if MASS and k > 0:
            member = member & (magnitude <= kth_of(counts, k))
        if PART == 0:
            place_of_bin = magnitude >> TWICE
        else:
            wanted = wanted_mass(table, top_p) if MASS else k
            prefix, before = limit_in(table, wanted)
            if PART == 1:
                member = member & ((magnitude >> TWICE) == prefix)
                place_of_bin = (magnitude >> BITS) & LOWEST
            else:
                second, _more = limit_in(table + BINS, wanted - before)
                member = member & ((magnitude >> BITS) == ((prefix << BITS) | second))
                place_of_bin = magnitude & LOWEST
        if MASS:
            weight = mass_of(shaped)
            member = member & (weight > 0)
        else:
            weight = tl.full(magnitude.shape, 1, tl.int64)
        tl.atomic_add(table + PART * BINS + place_of_bin, weight, mask=member, sem="relaxed")


@triton.jit
def find_cut(
    logits,
    parts,
    rows,
    temperatures,
    top_ks,
    top_ps,
    floors,  # float64, of log p'; -inf = off
    ids_of,
    limit_at,
    tables,
    cuts,  # int64: keys, see triton_draws.score
    first,
    width,
    stride,
    count,
    PADDED: tl.constexpr,
    NAMED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Leaves the key of a row's last token that stays; of equal ones the lower ids do."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(rows + row)
    temperature = tl.load(temperatures + row).to(tl.float32)
    k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    floor = tl.load(floors + row).to(tl.float32)
    counts = tables + row * 6 * BINS
    cut = tl.full([], NOTHING, tl.int64)
    if (temperature > 0) & (k > 0):
        cut = last_of(kth_of(counts, k))
    if (temperature > 0) & (top_p < 1):
        masses = counts + 3 * BINS
        wanted = wanted_mass(masses, top_p)
        prefix, before = limit_in(masses, wanted)
        second, more = limit_in(masses + BINS, wanted - before)
        third, most_more = limit_in(masses + 2 * BINS, wanted - before - more)
        magnitude = (prefix << TWICE) | (second << BITS) | third
        unit = mass_of(-(magnitude.to(tl.float32, bitcast=True)))
        staying = (wanted - before - more - most_more + unit - 1) // unit  # of those that are equal
        cut = last_of(magnitude)
        if staying * unit < tl.load(masses + 2 * BINS + third):
            limit = tl.load(limit_at)
            seen = tl.full([], 0, tl.int64)
            last = tl.full([], 0, tl.int32)
            for tile in range(tl.cdiv(width, TILE)):
                place, _inside, allowed, _ids, value, most, _best = row_of(
                    logits + at * stride,
                    parts + at * count,
                    count,
                    ids_of,
                    limit,
                    first,
                    width,
                    tile,
                    NAMED,
                    PADDED,
                    TILE,
                )
                equal = allowed & (magnitude_of(shaped_of(value, most, temperature)) == magnitude)
                order = seen + tl.cumsum(equal.to(tl.int64), 0)
                last = tl.maximum(last, tl.max(tl.where(equal & (order <= staying), place, 0), 0))
                seen += tl.sum(equal.to(tl.int64), 0)
            cut = key_of(-(magnitude.to(tl.float32, bitcast=True)), first + last)
    if temperature > 0:
        cut = tl.maximum(cut, key_of(floor, tl.full([], HIGHEST, tl.int32)))
    tl.store(cuts + row, cut)
