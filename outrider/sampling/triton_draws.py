"""The kernels that draw tokens on a GPU, in two passes over a row's logits, in tiles of the vocabulary.

What is largest is found by integers that order as pairs of number and id do, so that tiles may be merged in
any order; sums go along tiles, in their order. A row's token and shares do not depend on what else is drawn.
The numbers are those of noise.py and shaping.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = 1024  # ids of a program
WARPS = 8  # of a program that makes noise: with 4, a thread keeps more than fits its registers

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # as in noise.py
MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)
HIGHEST = tl.constexpr(0x7FFFFFFF)
ONES = tl.constexpr(0xFFFFFFFF)
ROUNDING = tl.constexpr(1.001)  # more than float32 and a quick exp may be off by
NOTHING = tl.constexpr(-(2**63))  # a key below all others
MOST = tl.constexpr(3.4028234663852886e38)  # as in shaping.py


@triton.jit
def key_of(value, place):
    """Returns int64 that order as (float32 value, lower place) do; NaN is above all."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ HIGHEST, bits)
    order = tl.where(value != value, HIGHEST, order)
    return (order.to(tl.int64) << 32) | (place ^ HIGHEST).to(tl.int64)


@triton.jit
def value_of(key):
    order = (key >> 32).to(tl.int32)
    return tl.where(order < 0, order ^ HIGHEST, order).to(tl.float32, bitcast=True)


@triton.jit
def finite(value):
    return tl.where(value == float("-inf"), 0.0, value)


@triton.jit
def place_of(key):
    return ((key & HIGHEST) ^ HIGHEST).to(tl.int32)


@triton.jit
def best_of(parts, count, PADDED: tl.constexpr):
    """Returns the largest of so many keys."""
    place = tl.arange(0, PADDED)
    return tl.max(tl.load(parts + place, mask=place < count, other=NOTHING), 0)


@triton.jit
def bits_of(key, ids):
    """Returns noise.py's bits, uint64, for a row's key (int64) and token ids."""
    z = key.to(tl.uint64) + (ids + 1).to(tl.uint64) * GOLDEN
    z = (z ^ (z >> 30)) * MULTIPLIER_1
    z = (z ^ (z >> 27)) * MULTIPLIER_2
    return z ^ (z >> 31)


@triton.jit
def exponential_of(bits):
    """Returns -log(u), float64."""
    return -tl.log(((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16)  # 2**-52


@triton.jit
def gumbel_of(bits):
    return (-tl.log(exponential_of(bits))).to(tl.float32)


@triton.jit
def could_win(shaped, bits, reached):
    """Returns False where log p' + noise is surely less than the likeliest token's, whose -log(u) is
    `reached`: see noisy_argmax.py. That takes no logarithm, which is what noise costs."""
    short = ((bits >> 32).to(tl.int64) ^ ONES).to(tl.float32) * 2.3283064365386963e-10  # of 1, 2**-32 at most
    # A product that is not a number tells nothing.
    return (short > tl.exp(shaped) * (reached.to(tl.float32) * ROUNDING)) == 0


@triton.jit
def shaped_of(logits, most, temperature):
    """Returns log p' up to a constant, as shaping.shape."""
    shaped = tl.div_rn(logits - most, tl.zeros_like(logits) + temperature)
    return tl.where(shaped < -MOST, -MOST, shaped)


@triton.jit
def row_of(
    logits,  # of the row
    parts,  # of the row
    count,  # of parts
    ids_of,
    limit,
    first,
    width,
    tile,
    NAMED: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Returns of a tile: the places in the row, whether they are in it and may be drawn, their ids, logits,
    the row's largest logit, and its key."""
    place = tile * TILE + tl.arange(0, TILE)
    inside = place < width
    best = best_of(parts, count, PADDED)
    most = value_of(best)
    value = tl.load(logits + place, mask=inside, other=float("-inf")).to(tl.float32)
    if NAMED:
        ids = tl.load(ids_of + place, mask=inside, other=0)
        allowed = inside & ((ids < limit) | (place == 0))
        if most == float("-inf"):  # a grammar leaves none of these ids: any is as bad
            value = tl.where(allowed, tl.zeros_like(value), value)
            most = tl.full([], 0.0, tl.float32)
            best = key_of(most, tl.full([], 0, tl.int32))
    else:
        ids = (first + place).to(tl.int64)
        allowed = inside & (ids < limit)
    return place, inside, allowed, ids, value, most, best


@triton.jit
def take(
    source,
    logits,
    parts,
    masks,
    mask_at,
    rows,
    ids_of,
    limit_at,
    first,
    width,
    source_stride,
    stride,
    mask_stride,
    tiles,
    SOURCE: tl.constexpr,  # whether logits come from `source`, or stand there
    ROWS: tl.constexpr,  # whether rows are told
    NAMED: tl.constexpr,  # whether ids are told
    MASKED: tl.constexpr,  # whether there are masks
    TILE: tl.constexpr,
) -> None:
    """Leaves float32 logits, -inf where an id may not be drawn, and the best of each tile."""
    row = tl.program_id(1).to(tl.int64)
    at = row
    if ROWS:
        at = tl.load(rows + row)
    limit = tl.load(limit_at)
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = place < width
    if NAMED:
        ids = tl.load(ids_of + place, mask=inside, other=0)
        allowed = inside & ((ids < limit) | (place == 0))
    else:
        ids = (first + place).to(tl.int64)
        allowed = inside & (ids < limit)
    if SOURCE:
        value = tl.load(source + row * source_stride + place, mask=inside, other=float("-inf")).to(tl.float32)
    else:
        value = tl.load(logits + at * stride + place, mask=inside, other=float("-inf"))
    if MASKED:
        mask = tl.load(mask_at + row)
        if mask >= 0:
            bits = tl.load(masks + mask * mask_stride + (ids >> 3), mask=inside, other=0).to(tl.int32)
            allowed = allowed & (((bits >> (ids & 7).to(tl.int32)) & 1) != 0)
    value = tl.where(allowed, value, float("-inf"))
    tl.store(logits + at * stride + place, value, mask=inside)
    key = tl.where(inside, key_of(value, first + place), NOTHING)
    tl.store(parts + at * tiles + tl.program_id(0), tl.max(key, 0))


@triton.jit
def score(
    logits,
    parts,  # of each row of logits: the best of its tiles, or of the ranks' slices
    rows,  # int64
    row_keys,  # int64
    temperatures,  # float64, 0 = the likeliest
    cuts,  # int64 of each row: the least number that stays, and the highest id of those that are equal to it
    ids_of,
    limit_at,
    out,
    sums,
    first,
    width,
    stride,
    count,
    tiles,
    PADDED: tl.constexpr,
    CUT: tl.constexpr,
    NAMED: tl.constexpr,
    COUNT: tl.constexpr,  # of best ones that are kept of each tile
    SHARES: tl.constexpr,  # whether they are weighed against one another
    TILE: tl.constexpr,
) -> None:
    """Leaves the keys of a tile's best (log p' + noise), and the sum of exp of them all."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.load(rows + row)
    temperature = tl.load(temperatures + row).to(tl.float32)
    tile = tl.program_id(0)
    place, inside, allowed, ids, value, most, best = row_of(
        logits + at * stride,
        parts + at * count,
        count,
        ids_of,
        tl.load(limit_at),
        first,
        width,
        tile,
        NAMED,
        PADDED,
        TILE,
    )
    target = out + (row * tiles + tile) * COUNT
    bits = bits_of(tl.load(row_keys + row), ids)
    if temperature > 0:
        value = shaped_of(value, most, temperature)
        if CUT:
            stays = key_of(value, first + place) >= tl.load(cuts + row)
            value = tl.where(stays, value, float("-inf"))
    if SHARES:
        if temperature > 0:
            value += gumbel_of(bits)
        value = tl.where(allowed, value, float("-inf"))
        key = tl.where(inside, key_of(value, first + place), NOTHING)
        top = tl.max(key, 0)
        tl.store(sums + row * tiles + tile, tl.sum(tl.exp(value - finite(value_of(top))), 0))
        tl.store(target, top)
        for index in tl.static_range(1, COUNT):
            key = tl.where(key == top, NOTHING, key)
            top = tl.max(key, 0)
            tl.store(target + index, top)
    elif temperature > 0:
        likeliest = place_of(best)
        if NAMED:
            # A row that fills up a record may have none.
            likeliest = tl.load(ids_of + likeliest, mask=likeliest < width, other=0).to(tl.int32)
        reached = exponential_of(bits_of(tl.load(row_keys + row), likeliest))
        hopeful = allowed & could_win(value, bits, reached)
        top = tl.full([], NOTHING, tl.int64)
        if tl.max(hopeful.to(tl.int32), 0) > 0:
            value = tl.where(allowed, value + gumbel_of(bits), float("-inf"))
            top = tl.max(tl.where(inside, key_of(value, first + place), NOTHING), 0)
        tl.store(target, top)
    else:
        tl.store(target, best)


@triton.jit
def merge(parts, rows, out, count, PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr) -> None:
    """Leaves of each row the best of so many keys: the key, or its id."""
    row = tl.program_id(0).to(tl.int64)
    best = best_of(parts + row * count, count, PADDED)
    at = row
    if ROWS:
        at = tl.load(rows + row)
    if KEYS:
        tl.store(out + at, best)
    else:
        tl.store(out + at, place_of(best).to(tl.int64))


@triton.jit
def merge_shares(
    parts,
    sums,
    ids_of,
    out,  # int32 of each row: COUNT ids, and the bits of their shares
    tiles,
    NAMED: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,  # tiles
    WIDE: tl.constexpr,  # keys
) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDE)
    keys = tl.load(parts + row * tiles * COUNT + place, mask=place < tiles * COUNT, other=NOTHING)
    top = tl.max(keys, 0)
    level = finite(value_of(top))
    tile = tl.arange(0, PADDED)
    of_tile = value_of(tl.load(parts + (row * tiles + tile) * COUNT, mask=tile < tiles, other=NOTHING))
    own = tl.load(sums + row * tiles + tile, mask=tile < tiles, other=0.0)
    total = tl.sum(tl.where(own > 0, own * tl.exp(of_tile - level), 0.0), 0)
    for index in tl.static_range(COUNT):
        token = place_of(top)
        share = tl.div_rn(tl.exp(value_of(top) - level), total)
        if NAMED:
            token = tl.load(ids_of + token).to(tl.int32)
        tl.store(out + row * 2 * COUNT + index, token)
        tl.store(out + row * 2 * COUNT + COUNT + index, share.to(tl.int32, bitcast=True))
        keys = tl.where(keys == top, NOTHING, keys)
        top = tl.max(keys, 0)
