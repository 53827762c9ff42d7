"""What the attention kernels compute, in plain torch and with copies of all keys for every token: for the
tests, on any device and in any number format."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from outrider.engine.paged_attention import Kernel


def reference_attention(
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
    token = torch.arange(query.shape[0], dtype=torch.int32, device=query.device)
    session = torch.searchsorted(query_ends[1:].contiguous(), token, right=True)  # [T]
    seen = seqused_k[session] - query_ends[1:][session] + token  # [T] position of each token
    tables = block_table[session].long()  # [T, pages]
    key = torch.arange(tables.shape[1] * keys.shape[1], device=query.device)  # [K]
    hidden = key > seen[:, None]
    if window_size[0] >= 0:
        hidden |= key < seen[:, None] - window_size[0]
    attended = F.scaled_dot_product_attention(
        query[:, :, None],  # [T, Hq, 1, D]
        keys[tables].flatten(1, 2).transpose(1, 2),  # [T, Hkv, K, D]
        values[tables].flatten(1, 2).transpose(1, 2),
        attn_mask=~hidden[:, None, None],
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return attended[:, :, 0]


KERNEL = Kernel("reference", 16, reference_attention, on_gpu=False)
