"""What lies between the products of a usual decoder's layer, as Triton kernels: two of them, and one that
stores keys and values of other models.

Each token is a program's own, and rounds as transformers' code does. What a product left in parts is summed
here, in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.engine.flat_inputs import FlatInputs


@triton.jit
def _summed(parts, at, inside, stride, PARTS: tl.constexpr):
    total = tl.load(parts + at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * stride + at, mask=inside, other=0.0)
    return total


@triton.jit
def _normed(
    x, parts, bias, weight, out, stride, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr,
    BIASED: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    at = token * WIDTH + column
    kind: tl.constexpr = x.dtype.element_ty
    row = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        added = _summed(parts, at, inside, stride, PARTS)
        if BIASED:
            added += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        row = (row + added.to(kind).to(tl.float32)).to(kind)
        tl.store(x + at, row, mask=inside)
        row = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, 0) / WIDTH + eps)
    normed = (row * scale).to(kind).to(tl.float32)
    found = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) * normed
    tl.store(out + at, found.to(kind), mask=inside)


@triton.jit
def _turned(
    parts,
    bias,
    query_norm,
    key_norm,
    cosines,
    sines,
    slots,
    again_ends,
    again,
    query,
    keys,
    values,
    stride,  # of parts
    key_stride,  # of a slot in the pool of keys
    value_stride,
    eps,
    QUERIES: tl.constexpr,  # heads
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,  # of a head
    PADDED: tl.constexpr,  # half of it, or more
    PARTS: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
    TREES: tl.constexpr,  # whether some go to more than one slot
) -> None:
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = WIDTH // 2
    column = tl.arange(0, PADDED)
    inside = column < half
    first = head * WIDTH + column
    at = token * ((QUERIES + 2 * KEYS) * WIDTH) + first
    kind: tl.constexpr = query.dtype.element_ty
    low = _summed(parts, at, inside, stride, PARTS)
    high = _summed(parts, at + half, inside, stride, PARTS)
    if BIASED:
        low += tl.load(bias + first, mask=inside, other=0.0).to(tl.float32)
        high += tl.load(bias + first + half, mask=inside, other=0.0).to(tl.float32)
    low, high = low.to(kind).to(tl.float32), high.to(kind).to(tl.float32)
    if head < QUERIES + KEYS:
        if NORMED:
            scale = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / WIDTH + eps)
            norm = query_norm if head < QUERIES else key_norm
            low = (low * scale).to(kind) * tl.load(norm + column, mask=inside, other=0.0)
            high = (high * scale).to(kind) * tl.load(norm + half + column, mask=inside, other=0.0)
            low, high = low.to(tl.float32), high.to(tl.float32)
        place = token * WIDTH + column
        cosine = tl.load(cosines + place, mask=inside, other=0.0).to(tl.float32)
        sine = tl.load(sines + place, mask=inside, other=0.0).to(tl.float32)
        other_cosine = tl.load(cosines + place + half, mask=inside, other=0.0).to(tl.float32)
        other_sine = tl.load(sines + place + half, mask=inside, other=0.0).to(tl.float32)
        turned = (low * cosine).to(kind).to(tl.float32) + (-high * sine).to(kind).to(tl.float32)
        other = (high * other_cosine).to(kind).to(tl.float32) + (low * other_sine).to(kind).to(tl.float32)
        low, high = turned, other
    low, high = low.to(kind), high.to(kind)
    if head < QUERIES:
        to = query + token * (QUERIES * WIDTH) + first
        tl.store(to, low, mask=inside)
        tl.store(to + half, high, mask=inside)
    else:
        if head < QUERIES + KEYS:
            pool = keys + (head - QUERIES) * WIDTH + column
            row = key_stride
        else:
            pool = values + (head - QUERIES - KEYS) * WIDTH + column
            row = value_stride
        to = pool + tl.load(slots + token) * row
        tl.store(to, low, mask=inside)
        tl.store(to + half, high, mask=inside)
        if TREES:
            for each in range(tl.load(again_ends + token), tl.load(again_ends + token + 1)):
                to = pool + tl.load(again + each).to(tl.int64) * row
                tl.store(to, low, mask=inside)
                tl.store(to + half, high, mask=inside)


@triton.jit
def _stored(
    key,
    value,
    slots,
    again_ends,
    again,
    keys,
    values,
    key_head,
    key_token,
    value_head,
    value_token,  # strides
    key_stride,  # of a slot in the pool of keys
    value_stride,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
) -> None:
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column, value_column = tl.arange(0, PADDED), tl.arange(0, VALUE_PADDED)
    inside, value_inside = column < WIDTH, value_column < VALUE_WIDTH
    k = tl.load(key + head * key_head + token * key_token + column, mask=inside, other=0.0)
    v = tl.load(value + head * value_head + token * value_token + value_column, mask=value_inside, other=0.0)
    key_to, value_to = keys + head * WIDTH + column, values + head * VALUE_WIDTH + value_column
    slot = tl.load(slots + token)
    tl.store(key_to + slot * key_stride, k, mask=inside)
    tl.store(value_to + slot * value_stride, v, mask=value_inside)
    for each in range(tl.load(again_ends + token), tl.load(again_ends + token + 1)):
        slot = tl.load(again + each).to(tl.int64)
        tl.store(key_to + slot * key_stride, k, mask=inside)
        tl.store(value_to + slot * value_stride, v, mask=value_inside)


def normed(
    x: torch.Tensor,  # [T, H]; what is added is added in place
    parts: torch.Tensor | None,  # [n, T, H], to be added
    bias: torch.Tensor | None,  # [H] of these
    weight: torch.Tensor,  # [H]
    eps: float,
) -> torch.Tensor:
    """Returns the RMS norm [T, H] of x and what is added to it."""
    out = torch.empty_like(x)
    tokens, width = x.shape
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _normed[(tokens,)](
            x,
            parts,
            bias,
            weight,
            out,
            x.numel(),
            eps,
            WIDTH=width,
            PADDED=triton.next_power_of_2(width),
            PARTS=0 if parts is None else len(parts),
            BIASED=bias is not None,
            enable_fp_fusion=False,  # so that no number of parts rounds otherwise
            num_warps=min(16, max(4, triton.next_power_of_2(width) // 512)),
        )
    return out


def turned(
    parts: torch.Tensor,  # [n, T, (Hq + 2 Hkv) * D]: queries, keys, values
    bias: torch.Tensor | None,  # [(Hq + 2 Hkv) * D]
    norms: tuple[torch.Tensor, torch.Tensor] | None,  # [D] each, of queries and of keys
    eps: float,
    positions: tuple[torch.Tensor, torch.Tensor],  # [T, D] cosines and sines
    slots: torch.Tensor,  # [T], where keys and values go
    again: tuple[torch.Tensor, torch.Tensor] | None,  # FlatInputs' again_ends and again
    pools: tuple[torch.Tensor, ...],  # [..., Hkv, D] each, of which slots count the rest
    heads: tuple[int, int],  # of queries, of keys
    dtype: torch.dtype,
) -> torch.Tensor:
    """Turns queries and keys by their positions, and stores keys and values. Returns the queries
    [T, Hq, D]."""
    (queries, key_heads), tokens = heads, parts.shape[1]
    keys, values = pools
    width = keys.shape[-1]
    query = torch.empty(tokens, queries, width, dtype=dtype, device=parts.device)
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        _turned[(tokens, queries + 2 * key_heads)](
            parts,
            bias,
            *(norms or (None, None)),
            *positions,
            slots,
            *(again or (None, None)),
            query,
            keys,
            values,
            parts.stride(0),
            keys.stride(-3),
            values.stride(-3),
            eps,
            QUERIES=queries,
            KEYS=key_heads,
            WIDTH=width,
            PADDED=triton.next_power_of_2(width // 2),
            PARTS=len(parts),
            BIASED=bias is not None,
            NORMED=norms is not None,
            TREES=again is not None,
            enable_fp_fusion=False,
            num_warps=1,
        )
    return query


def stored(
    key: torch.Tensor,  # [Hkv, T, D]
    value: torch.Tensor,  # [Hkv, T, Dv]
    keys: torch.Tensor,  # [num_blocks + 1, block_size, Hkv, D]
    values: torch.Tensor,  # [num_blocks + 1, block_size, Hkv, Dv]
    inputs: FlatInputs,
) -> None:
    """As attention_kernel.Store."""
    key, value = (each if each.stride(2) == 1 else each.contiguous() for each in (key, value))
    heads, tokens, width = key.shape
    value_width = value.shape[2]
    with torch.cuda.device_of(key):  # type: ignore[no-untyped-call]
        _stored[(tokens, heads)](
            key,
            value,
            inputs.slots,
            inputs.again_ends,
            inputs.again,
            keys,
            values,
            *key.stride()[:2],
            *value.stride()[:2],
            keys.stride(1),
            values.stride(1),
            WIDTH=width,
            PADDED=triton.next_power_of_2(width),
            VALUE_WIDTH=value_width,
            VALUE_PADDED=triton.next_power_of_2(value_width),
            num_warps=1,
        )
