"""The attention backend that reads the paged pool in place, by a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from outrider.engine.attention import LayerAttention
from outrider.engine.attention_kernel import Kernel
from outrider.engine.branching import LayOut
from outrider.engine.flat_inputs import FlatInputs, FlatStep, Shape, exact, fitting, flatten, on_device
from outrider.engine.kernel_bits import kernel_keeps_bits
from outrider.engine.kv_pools import PagedPools
from outrider.engine.paged_trees import lay_out_on_pages, split
from outrider.engine.picking import Rule
from outrider.engine.recurrent_state import RecurrentLayer
from outrider.engine.step_inputs import Work
from outrider.errors import ModelRefused


class PagedAttention:
    """Implements AttentionBackend."""

    fills_shapes = True
    states = None

    def __init__(self, kernel: Kernel, pools: PagedPools, device: torch.device) -> None:
        self.kernel = kernel
        self.pools = pools
        self.layers: dict[int, LayerAttention] = {}
        self.others: set[int] = set()
        self.takes_trees = kernel.store is not None
        self._device = device
        self._room: dict[Any, Any] = {}

    @classmethod
    def on(cls, model: Any, num_blocks: int, kernel: Kernel) -> PagedAttention:
        return cls(kernel, PagedPools(num_blocks, kernel.block_size), next(model.parameters()).device)

    @property
    def lay_out(self) -> LayOut | None:
        return partial(lay_out_on_pages, self.kernel.block_size) if self.takes_trees else None

    @property
    def name(self) -> str:
        return self.kernel.name

    def prepare(self, works: Sequence[Work], shapes: Sequence[Shape] = ()) -> FlatStep:
        if not self.takes_trees and any(work.parents for work in works):
            raise ValueError("this attention kernel takes no branches")
        size = self.pools.block_size
        parts = split(works, size)
        shape = fitting(shapes, parts.works, size) or exact(parts.works)
        step = flatten(
            parts.works, shape, block_size=size, scratch_block=self.pools.scratch_block, again=parts.again
        )
        moves = [pair for work in works for pair in work.moves]
        return replace(step, copies=tuple(filter(None, (moves, parts.copies))))

    def arrange(self, prepared: FlatStep) -> None:
        for copies in prepared.copies:
            self.pools.copy_everywhere(copies)

    def on_device(self, prepared: FlatStep) -> FlatInputs:
        return on_device(prepared, self._device)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [Hq, T, D]
        key: torch.Tensor,  # [Hkv, T, D]
        value: torch.Tensor,  # [Hkv, T, Dv]
        inputs: FlatInputs,
        how: LayerAttention,
        sinks: torch.Tensor | None = None,  # [Hq]
        picked: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert picked is None  # see `pick`
        if self.kernel.store is None:
            self.pools.write(layer, key, value, inputs.slots)
        else:
            self.kernel.store(key, value, *self.pools.made(layer, key, value), inputs)
        pools = self.pools.of(layer)
        return self.kernel.attend(query.transpose(0, 1), *pools, inputs, how, sinks, self._room)

    def attend_stored(
        self,
        layer: int,
        query: torch.Tensor,  # [T, Hq, D]
        inputs: FlatInputs,
        how: LayerAttention,
    ) -> torch.Tensor:
        """`attend` for keys and values that are in the pools: [T, Hq, Dv]."""
        return self.kernel.attend(query, *self.pools.of(layer), inputs, how, None, self._room)

    def earlier(self, layer: int, rows: torch.Tensor, inputs: FlatInputs, count: int) -> torch.Tensor:
        raise ModelRefused("attention kernels know no short convolutions")

    def carry_on(
        self, layer: int, which: RecurrentLayer, rows: torch.Tensor, inputs: FlatInputs
    ) -> list[torch.Tensor]:
        raise ModelRefused("attention kernels know no recurrent states")

    def pick(self, layer: int, key: torch.Tensor, inputs: FlatInputs, rule: Rule) -> torch.Tensor:
        raise ModelRefused("attention kernels see all keys, not those that an indexer picks")

    def batch_rows(self) -> None:
        """Nothing is to be done: in a kernel rows attend together."""

    def keeps_bits(self) -> bool:
        keys, _ = self.pools.of(next(iter(self.layers)))
        return kernel_keeps_bits(self.kernel, self.layers.values(), keys.dtype, keys.device)

    def resized(self, num_blocks: int, num_states: int = 0) -> PagedAttention:
        return PagedAttention(self.kernel, self.pools.resized(num_blocks), self._device)
