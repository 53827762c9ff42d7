"""Products of some rows with a large weight, as Triton kernels that give a row the same bits in any company.

A row's sum runs along the depth in the order that the weight's shape alone decides: in `splits` parts, each
by the matrix units from its begin to its end, and the parts in order. How many outputs and tokens a program
takes changes nothing of that, so the fastest tile is taken by timing. With few rows the parts are summed by
whoever reads them, which saves a kernel: see triton_rows.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

GROUP = 8  # outputs of a gate, then as many of what it multiplies: these meet in one thread
FILLED = 128  # programs that keep a GPU busy; no number of the device at hand, on which bits must not depend
SMALLEST = 64  # outputs of a program
SHORTEST = 512  # inputs of a part
MOST_SPLITS = 16


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut into programs."""

    outputs: int
    tokens: int
    depth: int
    stages: int
    warps: int
    whole: bool = False  # whether a program sums all parts itself


# What is tried, by the most tokens of a product.
TILES = {
    16: (Tile(64, 16, 128, 6, 4), Tile(64, 16, 128, 4, 4), Tile(64, 16, 256, 3, 4)),
    32: (Tile(64, 32, 128, 5, 4), Tile(64, 32, 64, 4, 4)),
    64: (Tile(64, 64, 128, 4, 4), Tile(128, 64, 64, 5, 4)),
    128: (Tile(64, 128, 64, 5, 4), Tile(128, 128, 64, 4, 8)),
    512: (Tile(128, 256, 64, 4, 8, True), Tile(128, 128, 64, 4, 8, True)),
}
LARGEST = max(TILES)


def size_of(tokens: int) -> int:
    """Returns the entry of TILES for so many tokens."""
    return next((size for size in TILES if tokens <= size), LARGEST)


def splits_of(outputs: int, depth: int) -> int:
    """Returns in how many parts a product's depth is cut, by the weight's shape alone."""
    splits, most = 1, min(MOST_SPLITS, depth // SHORTEST)
    while 2 * splits <= most and -(-outputs // SMALLEST) * splits < FILLED:
        splits *= 2
    return -(-depth // chunk_of(depth, splits))


@triton.jit(do_not_specialize=["tokens"])
def _product(
    x,
    weight,
    scales,
    bias,
    out,
    tokens,
    outputs,
    depth,
    chunk,  # inputs of a part
    OUTPUTS: tl.constexpr,  # of a program, as the following
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,  # that a program sums
    EVEN: tl.constexpr,  # whether outputs and chunks are whole tiles
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    columns = tl.cdiv(tokens, TOKENS)
    place, first = tl.program_id(0), tl.program_id(1)
    row = (place // columns) * OUTPUTS + tl.arange(0, OUTPUTS)
    token = (place % columns) * TOKENS + tl.arange(0, TOKENS)
    step = tl.arange(0, DEPTH)
    real = token < tokens
    weights = weight + row[:, None].to(tl.int64) * depth + step[None, :]
    inputs = x + token[None, :].to(tl.int64) * depth + step[:, None]
    total = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    for part in range(PARTS):
        begin = (first + part) * chunk
        end = tl.minimum(begin + chunk, depth)
        sums = tl.zeros([OUTPUTS, TOKENS], tl.float32)
        for k in range(begin, end, DEPTH):
            if EVEN:
                a = tl.load(weights + k)
                b = tl.load(inputs + k, mask=real[None, :], other=0.0)
            else:
                inside = k + step < end
                a = tl.load(weights + k, mask=(row < outputs)[:, None] & inside[None, :], other=0.0)
                b = tl.load(inputs + k, mask=real[None, :] & inside[:, None], other=0.0)
            sums = tl.dot(a.to(b.dtype), b, sums, input_precision=PRECISION)
        if SCALED:
            sums *= tl.load(scales + row, mask=row < outputs, other=0.0)[:, None]
        total += sums
    if BIASED:
        total += tl.load(bias + row, mask=row < outputs, other=0.0).to(tl.float32)[:, None]
    kind: tl.constexpr = out.dtype.element_ty
    if GATED:
        pairs = tl.reshape(total.to(kind), (OUTPUTS // GROUP // 2, 2, GROUP, TOKENS))
        gate, up = tl.split(tl.permute(pairs, (0, 2, 3, 1)))
        gate = gate.to(tl.float32)
        found = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * up.to(tl.float32)
        found = tl.reshape(found, (OUTPUTS // 2, TOKENS))
        half = (place // columns) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        there = (half < outputs // 2)[:, None] & real[None, :]
        tl.store(
            out + token[None, :].to(tl.int64) * (outputs // 2) + half[:, None], found.to(kind), mask=there
        )
    else:
        there = (row < outputs)[:, None] & real[None, :]
        at = (first * tokens + token).to(tl.int64)
        tl.store(out + at[None, :] * outputs + row[:, None], total.to(kind), mask=there)


@triton.jit
def _sum(
    parts, bias, out, count, outputs, PARTS: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(PARTS):
        total += tl.load(parts + part * count + at, mask=inside, other=0.0)
    if BIASED:
        total += tl.load(bias + at % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def parts_of(
    x: torch.Tensor,  # [T, depth], contiguous
    weight: torch.Tensor,  # [outputs, depth], contiguous
    scales: torch.Tensor | None,  # [outputs] float32, of the weight's rows
    bias: torch.Tensor | None,  # [outputs]; added only where the whole comes back
    tile: Tile,
) -> torch.Tensor:
    """Returns the product [1, T, outputs] in x's number format, with the bias; or its parts
    [splits, T, outputs] in float32, without, whose sum in order it is."""
    (tokens, depth), outputs = x.shape, len(weight)
    splits = splits_of(outputs, depth)
    whole = tile.whole or splits == 1
    shape = (1 if whole else splits, tokens, outputs)
    out = torch.empty(shape, dtype=x.dtype if whole else torch.float32, device=x.device)
    _launch(x, weight, scales, bias if whole else None, out, tile, splits, gated=False)
    return out


def gated(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None, tile: Tile
) -> torch.Tensor:
    """Returns silu(gate) * up [T, outputs / 2] for a weight whose outputs are those of both, in turns of
    GROUP."""
    out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    _launch(x, weight, scales, bias, out, tile, splits_of(*weight.shape), gated=True)
    return out


def whole(parts: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Returns the sum [T, outputs] of what `parts_of` returned."""
    if parts.dtype == dtype and len(parts) == 1:
        return parts[0]
    out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    grid = (triton.cdiv(out.numel(), 1024),)
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
        _sum[grid](
            parts,
            bias,
            out,
            out.numel(),
            parts.shape[2],
            PARTS=len(parts),
            BIASED=bias is not None,
            BLOCK=1024,
        )
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile,
    splits: int,
    gated: bool,
) -> None:
    (tokens, depth), outputs = x.shape, len(weight)
    inside = gated or tile.whole or splits == 1  # whether a program sums all parts
    chunk = chunk_of(depth, splits)
    programs = triton.cdiv(outputs, tile.outputs) * triton.cdiv(tokens, tile.tokens)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _product[(programs, 1 if inside else splits)](
            x,
            weight,
            scales,
            bias,
            out,
            tokens,
            outputs,
            depth,
            chunk,
            OUTPUTS=tile.outputs,
            TOKENS=tile.tokens,
            DEPTH=tile.depth,
            PARTS=splits if inside else 1,
            EVEN=outputs % tile.outputs == 0 and depth % tile.depth == 0 and chunk % tile.depth == 0,
            SCALED=scales is not None,
            BIASED=bias is not None,
            GATED=gated,
            GROUP=GROUP,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_stages=tile.stages,
            num_warps=tile.warps,
            enable_fp_fusion=False,  # what is scaled rounds before it is added, as where parts are stored
        )


def chunk_of(depth: int, splits: int) -> int:
    """Returns the inputs of a part: whole steps of the deepest tile, so that all tiles sum alike."""
    return -(-depth // (splits * 256)) * 256 if splits > 1 else depth
