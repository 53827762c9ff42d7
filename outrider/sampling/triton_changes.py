"""The kernels that apply penalties and biases to logits on a GPU, as shaping.change does."""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.sampling.triton_draws import MOST

ENTRIES = 512  # of a program


@triton.jit
def within(value):
    """Returns numbers without infinities."""
    return tl.where(value > MOST, MOST, tl.where(value < -MOST, -MOST, value))


@triton.jit
def penalize_some(logits, ids, less, factor, there):
    value = tl.load(logits + ids, mask=there, other=0.0)
    factors = tl.zeros_like(value) + factor
    value = tl.where(value > 0, tl.div_rn(value, factors), value * factors) - less
    tl.store(logits + ids, within(value), mask=there)


@triton.jit
def penalize(
    logits,
    rows,  # int64
    firsts,  # int64 of each row: where its committed tokens stand
    counts,
    drafted_firsts,
    drafted_counts,
    factors,  # float64
    ids,  # int32; below 0 where they cannot be drawn
    numbers,  # float32, of each of `ids`: what to subtract of its logit
    width,
    stride,
    ENTRIES: tl.constexpr,
) -> None:
    """Changes the logits of the tokens that came before, once each. Drafted ones say for themselves how often
    they did."""
    row = tl.program_id(1)
    part = tl.program_id(0)
    of_row = logits + tl.load(rows + row) * stride
    factor = tl.load(factors + row).to(tl.float32)
    drafted = tl.load(drafted_firsts + row)
    drafted_count = tl.load(drafted_counts + row).to(tl.int32)
    place = part * ENTRIES + tl.arange(0, ENTRIES)
    known = place < tl.load(counts + row)
    source = tl.load(firsts + row) + place
    token = tl.load(ids + source, mask=known, other=-1)
    less = tl.load(numbers + source, mask=known, other=0.0)
    there = (token >= 0) & (token < width)
    for index in range(drafted_count):
        there = there & (token != tl.load(ids + drafted + index))
    penalize_some(of_row, token, less, factor, there)
    if part == 0:
        for start in range(0, drafted_count, ENTRIES):
            place = start + tl.arange(0, ENTRIES)
            known = place < drafted_count
            token = tl.load(ids + drafted + place, mask=known, other=-1)
            less = tl.load(numbers + drafted + place, mask=known, other=0.0)
            penalize_some(of_row, token, less, factor, (token >= 0) & (token < width))


@triton.jit
def add_biases(logits, rows, firsts, counts, ids, numbers, width, stride, ENTRIES: tl.constexpr) -> None:
    """Adds numbers to logits."""
    row = tl.program_id(1)
    of_row = logits + tl.load(rows + row) * stride
    place = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    known = place < tl.load(counts + row)
    source = tl.load(firsts + row) + place
    token = tl.load(ids + source, mask=known, other=-1)
    there = (token >= 0) & (token < width)
    value = tl.load(of_row + token, mask=there, other=0.0)
    value += tl.load(numbers + source, mask=there, other=0.0)
    tl.store(of_row + token, within(value), mask=there)
