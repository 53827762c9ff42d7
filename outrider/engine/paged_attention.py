"""Attention that reads the paged pool in place, by a kernel: which kernels there are, and what they compute.

All are called as torch's own, torch.nn.attention.varlen.varlen_attn, is.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from outrider.engine.flat_inputs import FlatInputs

if TYPE_CHECKING:
    from outrider.engine.attention import LayerAttention

PagedAttention = Callable[..., Any]  # a tensor [T, Hq, D]
WIDEST = 256  # head that the kernels take
VARLEN_BLOCK = 256  # torch's build of FlashAttention 2 refuses blocks that are no multiple of it
TRITON_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Kernel:
    """A way to attend to a paged pool [num_blocks + 1, block_size, Hkv, D]."""

    name: str
    block_size: int  # tokens; the pool is cut into such blocks
    attention: PagedAttention

    def attend(
        self,
        query: torch.Tensor,  # [T, Hq, D]
        keys: torch.Tensor,  # pool
        values: torch.Tensor,  # pool
        inputs: FlatInputs,
        how: LayerAttention,
    ) -> torch.Tensor:
        """Every token sees its session's keys up to its own position: [T, Hq, D]."""
        attended: torch.Tensor = self.attention(
            query,
            keys,
            values,
            inputs.query_ends,
            inputs.key_ends,
            inputs.longest,
            inputs.tables.shape[1] * self.block_size,
            scale=how.scale,
            window_size=(-1 if how.window is None else how.window - 1, 0),
            enable_gqa=how.query_heads != how.key_heads,
            seqused_k=inputs.keys,
            block_table=inputs.tables,
            num_splits=1,  # with others, torch 2.13's kernel gives wrong rows now and then
        )
        return attended


def refusal(how: LayerAttention, dtype: torch.dtype) -> str | None:
    """Why no kernel can do what a layer asks for, as a phrase; None where they can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"they compute in 16 bits, not in {str(dtype).removeprefix('torch.')}"
    if how.softcap is not None:
        return "they cap no scores"
    if how.width != how.value_width:
        return "keys and values differ in width"
    if how.width > WIDEST or how.width % 8:
        return f"they take no heads of width {how.width}"
    return None


def kernels() -> list[Kernel]:
    """What this installation has for a GPU, best kept first."""
    found = []
    if (varlen := _varlen()) is not None:
        found.append(Kernel("varlen", VARLEN_BLOCK, varlen))
    if importlib.util.find_spec("triton") is not None:
        from outrider.engine.triton_attention import triton_attention

        found.append(Kernel("triton", TRITON_BLOCK, triton_attention))
    return found


def _varlen() -> PagedAttention | None:
    """torch's own, where it knows of pages: from 2.13 on."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    wanted = {"block_table", "seqused_k", "num_splits", "enable_gqa", "window_size"}
    return varlen_attn if wanted <= set(inspect.signature(varlen_attn).parameters) else None


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
    """What the kernels compute, in plain torch and with copies of all keys for every token: on a CPU, and to
    compare them with."""
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


REFERENCE = Kernel("reference", 16, reference_attention)
