"""The kernels that find which tokens top_k, top_p and min_p keep, without a sort and without the host.

log p' are at most 0, so their magnitudes order them. They are looked at in four parts: how many tokens, or
how much of the mass, each range of two units of log p' has; then, of the range that holds the last token that
stays, what each value of the upper bits has, then of the next ones, then of the last. Mass is counted in
whole units, which come to the same sum in any order: a row's tokens do not depend on what else is drawn.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.sampling.triton_draws import HIGHEST, NOTHING, key_of, row_of, shaped_of

BITS = tl.constexpr(10)  # of a part
BINS = tl.constexpr(2**10)  # of a part
LOWEST = tl.constexpr(2**10 - 1)  # the bits of one
RANGES = tl.constexpr(16)  # the last of them without an end
PARTS = 4
TILE = 4096  # ids of a program
WARPS = 8
UNIT = tl.constexpr(2.0**44)  # units of the likeliest token's mass; 2**18 such tokens are below 2**63


@triton.jit
def mass_of(shaped):
    """Returns exp, in whole units."""
    return (tl.exp(shaped.to(tl.float64)) * UNIT + 0.5).to(tl.int64)


@triton.jit
def weight_of(shaped, MASS: tl.constexpr):
    """Returns a token's mass, or that it is one."""
    weight = tl.full(shaped.shape, 1, tl.int64)
    if MASS:
        weight = mass_of(shaped)
    return weight


@triton.jit
def magnitude_of(shaped):
    return shaped.to(tl.int32, bitcast=True) & HIGHEST


@triton.jit
def range_of(shaped):
    return tl.minimum(-shaped * 0.5, RANGES - 1.0).to(tl.int32)


@triton.jit
def start_of(which):
    """Returns the least magnitude of a range."""
    return (which * 2).to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def last_bits_of(which):
    """Returns how many bits the last part has: a range has 2**23 numbers at most, but for the first, which
    has small ones, and the last."""
    return tl.where((which == 0) | (which == RANGES - 1), 10, 3)


@triton.jit
def magnitude_in(state):
    """Returns the magnitude of the last token that stays, once all parts are known."""
    return start_of(tl.load(state).to(tl.int32)) + tl.load(state + 1).to(tl.int32)


@triton.jit
def last_of(magnitude):
    """Returns the key of a number of this magnitude that all tokens with as much reach."""
    return key_of(-(magnitude.to(tl.float32, bitcast=True)), tl.full([], HIGHEST, tl.int32))


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
    tables,  # int64 of each row: counts and masses, [2, 4, BINS]
    states,  # int64 of each row: for top_k and for top_p, see `narrow`, [2, 3]
    first,
    width,
    stride,
    count,
    PADDED: tl.constexpr,
    MASS: tl.constexpr,  # 1 for top_p, 0 for top_k
    PART: tl.constexpr,
    NAMED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Adds what a tile's tokens have to the bins of a part."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.load(rows + row)
    temperature = tl.load(temperatures + row).to(tl.float32)
    k = tl.load(top_ks + row)
    table = tables + ((row * 2 + MASS) * 4 + PART) * BINS
    cut = k > 0
    if MASS:
        cut = tl.load(top_ps + row) < 1
    if cut & (temperature > 0):
        _, _, member, _, value, most, _ = row_of(
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
        which = range_of(shaped)
        if MASS:  # noqa: SIM102 - known when it is compiled, unlike the next
            if k > 0:
                member = member & (magnitude <= magnitude_in(states + row * 6))
        if PART == 0:
            weight = weight_of(shaped, MASS)
            for index in tl.static_range(RANGES):
                some = tl.sum(tl.where(member & (which == index), weight, 0), 0)
                tl.atomic_add(table + index, some, sem="relaxed")
        else:
            state = states + row * 6 + 3 * MASS
            wanted = tl.load(state).to(tl.int32)  # range
            last_bits = last_bits_of(wanted)
            offset = magnitude - start_of(wanted)
            member = member & (which == wanted)
            if PART == 1:
                place = offset >> (last_bits + BITS)
            elif PART == 2:
                member = member & ((offset >> (last_bits + BITS)) == tl.load(state + 1))
                place = (offset >> last_bits) & LOWEST
            else:
                member = member & ((offset >> last_bits) == tl.load(state + 1))
                place = offset & ((1 << last_bits) - 1)
            if tl.max(member.to(tl.int32), 0) > 0:  # in few tiles, once some bits are known
                tl.atomic_add(table + place, weight_of(shaped, MASS), mask=member, sem="relaxed")


@triton.jit
def narrow(
    top_ks, top_ps, tables, states, MASS: tl.constexpr, PART: tl.constexpr, BINS: tl.constexpr
) -> None:
    """Leaves in which range the last token that stays is, the bits so far of its place in it, and what is
    still wanted of tokens with these bits."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BINS)
    bins = tl.load(tables + ((row * 2 + MASS) * 4 + PART) * BINS + place)
    state = states + row * 6 + 3 * MASS
    if PART > 0:
        wanted = tl.load(state + 2)
    else:
        if MASS:
            total = tl.sum(bins, 0).to(tl.float64)
            wanted = tl.ceil(tl.load(top_ps + row) * total).to(tl.int64)
        else:
            wanted = tl.load(top_ks + row)
    found = tl.sum((tl.cumsum(bins, 0) < wanted).to(tl.int64), 0)
    before = tl.sum(tl.where(place < found, bins, 0), 0)
    if PART == 0:
        tl.store(state, found)
    elif PART == 1:
        tl.store(state + 1, found)
    elif PART == 2:
        tl.store(state + 1, (tl.load(state + 1) << BITS) | found)
    else:
        tl.store(state + 1, (tl.load(state + 1) << last_bits_of(tl.load(state)).to(tl.int64)) | found)
    tl.store(state + 2, wanted - before)


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
    states,
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
    floor = tl.load(floors + row).to(tl.float32)
    cut = tl.full([], NOTHING, tl.int64)
    if (temperature > 0) & (tl.load(top_ks + row) > 0):
        cut = last_of(magnitude_in(states + row * 6))
    if (temperature > 0) & (tl.load(top_ps + row) < 1):
        state = states + row * 6 + 3
        magnitude = magnitude_in(state)
        value = -(magnitude.to(tl.float32, bitcast=True))
        unit = mass_of(value)
        staying = (tl.load(state + 2) + unit - 1) // unit  # of those that are equal
        cut = last_of(magnitude)
        place_of_bin = tl.load(state + 1) & ((1 << last_bits_of(tl.load(state))) - 1)
        if staying * unit < tl.load(tables + ((row * 2 + 1) * 4 + 3) * BINS + place_of_bin):
            limit = tl.load(limit_at)
            seen = tl.full([], 0, tl.int64)
            last = tl.full([], 0, tl.int32)
            for tile in range(tl.cdiv(width, TILE)):
                place, _, allowed, _, logit, most, _ = row_of(
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
                equal = allowed & (magnitude_of(shaped_of(logit, most, temperature)) == magnitude)
                order = seen + tl.cumsum(equal.to(tl.int64), 0)
                last = tl.maximum(last, tl.max(tl.where(equal & (order <= staying), place, 0), 0))
                seen += tl.sum(equal.to(tl.int64), 0)
            cut = key_of(value, first + last)
    if temperature > 0:
        cut = tl.maximum(cut, key_of(floor, tl.full([], HIGHEST, tl.int32)))
    tl.store(cuts + row, cut)
