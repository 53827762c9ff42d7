"""torch's own attention kernel for sequences of many lengths, where it knows of pages: from 2.13 on."""

from __future__ import annotations

import inspect

from torch.nn.attention.varlen import varlen_attn

from outrider.engine.paged_attention import Kernel

BLOCK_SIZE = 256  # torch's build of FlashAttention 2 refuses blocks that are no multiple of it

wanted = {"block_table", "seqused_k", "num_splits", "enable_gqa", "window_size"}
if not wanted <= set(inspect.signature(varlen_attn).parameters):
    raise ImportError("torch's varlen_attn reads no paged pool here; it does from torch 2.13 on")

KERNEL = Kernel("varlen", BLOCK_SIZE, varlen_attn)
