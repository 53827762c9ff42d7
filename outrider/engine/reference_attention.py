"""What the attention kernels compute, in plain torch and with copies of all keys for every token: for the
tests, on any device and in any number format."""

from __future__ import annotations

from typing import Any

import torch

from outrider.engine.attention import LayerAttention
from outrider.engine.attention_kernel import Kernel
from outrider.engine.flat_inputs import FlatInputs


def reference_attention(
    query: torch.Tensor,  # [T, Hq, D]
    keys: torch.Tensor,  # [blocks, block_size, Hkv, D]
    values: torch.Tensor,  # [blocks, block_size, Hkv, Dv]
    inputs: FlatInputs,
    how: LayerAttention,
    sinks: torch.Tensor | None,  # [Hq]
    _room: dict[Any, Any],
) -> torch.Tensor:
    """As Kernel's: [T, Hq, Dv]."""
    ends = inputs.query_ends[1:]
    token = torch.arange(query.shape[0], dtype=torch.int32, device=query.device)
    session = torch.searchsorted(ends.contiguous(), token, right=True)  # [T]
    position = (inputs.keys[session] - ends[session] + token)[:, None]  # [T, 1]
    tables = inputs.tables[session].long()  # [T, pages]
    key = torch.arange(tables.shape[1] * keys.shape[1], device=query.device)  # [K]
    hidden = key > position
    if how.window is not None:
        hidden |= key <= position - how.window
    if how.chunk is not None:
        hidden |= key < position // how.chunk * how.chunk
    by_head = len(query), how.key_heads, how.sharing, -1
    scores = torch.einsum("thgd,tkhd->thgk", query.reshape(by_head), keys[tables].flatten(1, 2))
    scores = scores.flatten(1, 2) * how.scale  # [T, Hq, K]
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores)[None, :, None].expand(len(scores), -1, 1)], 2)
    weights = scores.softmax(2)[:, :, : len(key)].reshape(by_head)
    return torch.einsum("thgk,tkhd->thgd", weights, values[tables].flatten(1, 2)).flatten(1, 2)


def store(
    key: torch.Tensor,  # [Hkv, T, D]
    value: torch.Tensor,  # [Hkv, T, Dv]
    keys: torch.Tensor,  # [blocks, block_size, Hkv, D]
    values: torch.Tensor,  # [blocks, block_size, Hkv, Dv]
    inputs: FlatInputs,
) -> None:
    """As Kernel's."""
    token = torch.arange(len(inputs.slots), device=key.device)
    again = torch.repeat_interleave(token, inputs.again_ends.diff())
    tokens, slots = torch.cat([token, again]), torch.cat([inputs.slots, inputs.again[: len(again)]])
    for pool, new in ((keys, key), (values, value)):
        pool.flatten(0, 1)[slots] = new.transpose(0, 1)[tokens]


KERNEL = Kernel(
    "reference", 16, reference_attention, lambda _how, _dtype: None, may_keep_bits=False, store=store
)
