"""The attention backend that reads the paged pool in place, by a kernel.

Kernels are called as torch's own, torch.nn.attention.varlen.varlen_attn, is. Each stands in a file of its
own; parts.py says which there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.engine.attention import LayerAttention
from outrider.engine.flat_inputs import FlatInputs, FlatStep, Shape, exact, fitting, flatten, on_device
from outrider.engine.kv_pools import PagedPools
from outrider.engine.recurrent_state import RecurrentLayer
from outrider.engine.step_inputs import Work
from outrider.errors import ModelRefused

WIDEST = 256  # head that the kernels of a GPU take


@dataclass(frozen=True, slots=True)
class Kernel:
    """A way to attend to a paged pool [num_blocks + 1, block_size, Hkv, D]."""

    name: str
    block_size: int  # tokens; the pool is cut into such blocks
    attention: Callable[..., Any]  # a tensor [T, Hq, D]
    on_gpu: bool = True  # only there, and in 16 bits

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

    def refusal(self, how: LayerAttention, dtype: torch.dtype) -> str | None:
        """Returns why it cannot do what a layer asks for, as a phrase; None where it can."""
        if self.on_gpu and dtype not in (torch.bfloat16, torch.float16):
            return f"they compute in 16 bits, not in {str(dtype).removeprefix('torch.')}"
        if how.softcap is not None:
            return "they cap no scores"
        if how.sinks:
            return "they know no attention sinks"
        if how.chunk is not None:
            return "they know no chunked attention"
        if how.width != how.value_width:
            return "keys and values differ in width"
        if self.on_gpu and (how.width > WIDEST or how.width % 8):
            return f"they take no heads of width {how.width}"
        return None


class PagedAttention:
    """Implements AttentionBackend."""

    fills_shapes = True
    panel = 0  # a kernel lets a token see all before it
    states = None

    def __init__(self, kernel: Kernel, pools: PagedPools, device: torch.device) -> None:
        self.kernel = kernel
        self.pools = pools
        self.layers: dict[int, LayerAttention] = {}
        self.others: set[int] = set()
        self._device = device

    @classmethod
    def on(cls, model: Any, num_blocks: int, kernel: Kernel) -> PagedAttention:
        return cls(kernel, PagedPools(num_blocks, kernel.block_size), next(model.parameters()).device)

    @property
    def name(self) -> str:
        return self.kernel.name

    def prepare(self, works: Sequence[Work], shapes: Sequence[Shape] = ()) -> FlatStep:
        if any(work.parents for work in works):
            raise ValueError("attention kernels take no branches")
        size = self.pools.block_size
        shape = fitting(shapes, works, size) or exact(works)
        return flatten(works, shape, block_size=size, scratch_block=self.pools.scratch_block)

    def on_device(self, prepared: FlatStep) -> FlatInputs:
        return on_device(prepared, self._device)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [Hq, T, D]
        key: torch.Tensor,  # [Hkv, T, D]
        value: torch.Tensor,  # [Hkv, T, D]
        inputs: FlatInputs,
        how: LayerAttention,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.pools.write(layer, key, value, inputs.slots)
        return self.kernel.attend(query.transpose(0, 1), *self.pools.of(layer), inputs, how)

    def earlier(self, layer: int, rows: torch.Tensor, inputs: FlatInputs, count: int) -> torch.Tensor:
        raise ModelRefused("attention kernels know no short convolutions")

    def carry_on(
        self, layer: int, which: RecurrentLayer, rows: torch.Tensor, inputs: FlatInputs
    ) -> list[torch.Tensor]:
        raise ModelRefused("attention kernels know no recurrent states")

    def batch_rows(self) -> None:
        """Kernels do."""

    def keeps_bits(self) -> bool:
        """Nobody has measured it."""
        return False

    def resized(self, num_blocks: int, num_states: int = 0) -> PagedAttention:
        return PagedAttention(self.kernel, self.pools.resized(num_blocks), self._device)
