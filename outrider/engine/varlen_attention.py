"""torch's own attention kernel for sequences of many lengths, where it knows of pages: from 2.13 on."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

from outrider.engine.attention import LayerAttention
from outrider.engine.attention_kernel import Kernel
from outrider.engine.flat_inputs import FlatInputs

BLOCK_SIZE = 256  # torch's build of FlashAttention 2 refuses blocks that are no multiple of it

wanted = {"block_table", "seqused_k", "num_splits", "enable_gqa", "window_size"}
if not wanted <= set(inspect.signature(varlen_attn).parameters):
    raise ImportError("torch's varlen_attn reads no paged pool here; it does from torch 2.13 on")


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    inputs: FlatInputs,
    how: LayerAttention,
    _sinks: torch.Tensor | None,
    _room: dict[Any, Any],
) -> torch.Tensor:
    """As Kernel's."""
    attended = varlen_attn(
        query,
        keys,
        values,
        inputs.query_ends,
        inputs.key_ends,
        inputs.longest,
        inputs.tables.shape[1] * keys.shape[1],
        scale=how.scale,
        window_size=(-1 if how.window is None else how.window - 1, 0),
        enable_gqa=how.query_heads != how.key_heads,
        seqused_k=inputs.keys,
        block_table=inputs.tables,
        num_splits=1,  # with others, torch 2.13's kernel gives wrong rows now and then
    )
    assert isinstance(attended, torch.Tensor)  # it gives more only if asked to
    return attended


KERNEL = Kernel("varlen", BLOCK_SIZE, attend)
