"""Attention over a paged pool as a Triton kernel, for installations whose torch has none of its own.

A program takes one head of keys and a few tokens of one session, together with all query heads that share
that head of keys, so that each key is read once for all of them. The softmax runs along the keys as they come
(Dao et al., "FlashAttention", 2022). A token's result does not depend on what else is in the step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.engine.paged_attention import Kernel

BLOCK_SIZE = 64
ROWS = 16  # of a program: tokens times query heads; the least that the matrix units take
LOG2_E = 1.4426950408889634


@triton.jit
def _attend(
    query,
    keys,
    values,
    out,
    query_ends,
    keys_used,
    tables,
    pages,  # of a table
    scale,  # of the scores, in units of log2
    window,  # keys that a token sees before its own; -1 = all
    query_token,
    query_head,  # strides
    pool_block,
    pool_token,
    pool_head,
    BLOCK: tl.constexpr,  # keys of a block
    SHARED: tl.constexpr,  # query heads that share a head of keys
    TOKENS: tl.constexpr,  # of a program
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,  # the width's next power of two
) -> None:
    session, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(query_ends + session)
    count = tl.load(query_ends + session + 1) - first
    if part * TOKENS < count:
        used = tl.load(keys_used + session)
        row = tl.arange(0, ROWS)
        index = part * TOKENS + row // SHARED  # of the token in its session
        real = (row < TOKENS * SHARED) & (index < count)
        position = used - count + index
        column = tl.arange(0, PADDED)
        place = (first + index) * query_token + (head * SHARED + row % SHARED) * query_head
        there = real[:, None] & (column < WIDTH)[None, :]
        q = tl.load(query + place[:, None] + column[None, :], mask=there, other=0.0)

        last = used - count + tl.minimum(part * TOKENS + TOKENS, count)  # keys that the last token sees
        begin = tl.where(window >= 0, tl.maximum(used - count + part * TOKENS - window, 0) // BLOCK, 0)
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, PADDED], tl.float32)
        offset = tl.arange(0, BLOCK)
        for page in range(begin, tl.cdiv(last, BLOCK)):
            block = tl.load(tables + session * pages + page).to(tl.int64)
            key = page * BLOCK + offset
            inside = (key < used)[:, None] & (column < WIDTH)[None, :]
            source = block * pool_block + head * pool_head + offset[:, None] * pool_token + column[None, :]
            k = tl.load(keys + source, mask=inside, other=0.0)
            v = tl.load(values + source, mask=inside, other=0.0)
            scores = tl.dot(q, tl.trans(k)) * scale
            ahead = key[None, :] - position[:, None]
            seen = (ahead <= 0) & ((window < 0) | (ahead >= -window))
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, 1))
            level = tl.where(higher == float("-inf"), 0.0, higher)  # where nothing has been seen yet
            weights = tl.exp2(scores - level[:, None])
            fade = tl.exp2(best - level)
            total = total * fade + tl.sum(weights, 1)
            sums = sums * fade[:, None] + tl.dot(weights.to(v.dtype), v)
            best = higher
        tl.store(out + place[:, None] + column[None, :], (sums / total[:, None]).to(q.dtype), mask=there)


def triton_attention(
    query: torch.Tensor,  # [T, Hq, D]
    keys: torch.Tensor,  # [blocks, block_size, Hkv, D]
    values: torch.Tensor,  # [blocks, block_size, Hkv, D]
    query_ends: torch.Tensor,  # [S + 1] int32
    key_ends: torch.Tensor | None,
    longest: int,
    most_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,  # [S] int32
    block_table: torch.Tensor,  # [S, pages] int32
    num_splits: int,
) -> torch.Tensor:
    """As torch.nn.attention.varlen.varlen_attn: [T, Hq, D]."""
    query = query.contiguous()
    out = torch.empty_like(query)
    heads, width = keys.shape[2], query.shape[2]
    shared = query.shape[1] // heads
    rows = max(ROWS, triton.next_power_of_2(shared))
    tokens = min(rows // shared, triton.next_power_of_2(longest))
    grid = (len(seqused_k), heads, triton.cdiv(longest, tokens))
    on_its_device = torch.cuda.device_of(query)  # type: ignore[no-untyped-call]
    with on_its_device:  # Triton launches on the current one
        _attend[grid](
            query,
            keys,
            values,
            out,
            query_ends,
            seqused_k,
            block_table,
            block_table.stride(0),
            scale * LOG2_E,
            window_size[0],
            query.stride(0),
            query.stride(1),
            keys.stride(0),
            keys.stride(1),
            keys.stride(2),
            BLOCK=keys.shape[1],
            SHARED=shared,
            TOKENS=tokens,
            ROWS=rows,
            WIDTH=width,
            PADDED=triton.next_power_of_2(width),
        )
    return out


KERNEL = Kernel("triton", BLOCK_SIZE, triton_attention)
