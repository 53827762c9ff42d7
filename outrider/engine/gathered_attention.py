"""The attention backend that brings a session's keys together before it attends to them, on any device.

On a CPU in float32 a row gets the same bits whatever runs beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from outrider.engine import indexer, invariance, picking, sdpa
from outrider.engine.attention import LayerAttention
from outrider.engine.branching import PANELS, LayOut, lay_out
from outrider.engine.flat_inputs import Shape
from outrider.engine.kv_pools import KvPools
from outrider.engine.recurrent_state import RecurrentLayer, RecurrentStates
from outrider.engine.step_inputs import RowBatching, StepInputs, Work, build_step

BLOCK_SIZE = 16


class GatheredAttention:
    """Implements AttentionBackend."""

    name = "gathered"
    fills_shapes = False  # how much is gathered differs from step to step

    def __init__(
        self,
        pools: KvPools,
        device: torch.device,
        dtype: torch.dtype,
        row_batching: RowBatching | None = None,
        panel: int = PANELS[-1],
        states: RecurrentStates | None = None,
    ) -> None:
        """`row_batching`: how rows attend together; None = each alone. `panel`: of keys, as trees need it, in
        branching.py; 0 = a step takes no trees."""
        self.pools = pools
        self.states = states
        self.layers: dict[int, LayerAttention] = {}
        self.others: set[int] = set()
        self.indexers: set[tuple[int, ...]] = set()  # heads and width of those that pick keys
        self.row_batching = row_batching
        self.panel = panel if states is None else 0  # states are of one path
        self._device, self._dtype = device, dtype
        self._shown: tuple[RowBatching, int] | None = None  # to keep bits, with so many threads

    @classmethod
    def on(cls, model: Any, num_blocks: int) -> GatheredAttention:
        parameter, states = next(model.parameters()), RecurrentStates.of(model, num_blocks, BLOCK_SIZE)
        panel = 0 if indexer.are_in(model) else PANELS[-1]  # on a branch keys stand elsewhere
        pools = KvPools(num_blocks, BLOCK_SIZE)
        return cls(pools, parameter.device, parameter.dtype, panel=panel, states=states)

    @property
    def lay_out(self) -> LayOut | None:
        return partial(lay_out, self.panel) if self.panel else None

    def prepare(self, works: Sequence[Work], shapes: Sequence[Shape] = ()) -> StepInputs:
        inputs = build_step(
            works,
            block_size=self.pools.block_size,
            scratch_block=self.pools.scratch_block,
            device=self._device,
            mask_dtype=self._dtype,
            views={how.view for how in self.layers.values()},
            key_bytes=self.pools.key_bytes,
            row_batching=self.row_batching,
        )
        return self._begun(works, inputs)

    def _begun(self, works: Sequence[Work], inputs: StepInputs) -> StepInputs:
        """Adds what the step does with states, if there are any."""
        if self.lay_out is None and any(work.parents for work in works):
            raise ValueError("this attention takes no branches")
        if self.states is not None:
            inputs.states = self.states.prepare(works, inputs.ends.tolist(), self._device)
        return inputs

    def arrange(self, prepared: StepInputs) -> None:
        """Nothing is to be done: each layer copies before it stores."""

    def on_device(self, prepared: StepInputs) -> StepInputs:
        return prepared

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [Hq, T, D]
        key: torch.Tensor,  # [Hkv, T, D]
        value: torch.Tensor,  # [Hkv, T, Dv]
        inputs: StepInputs,
        how: LayerAttention,
        sinks: torch.Tensor | None = None,  # [Hq]
        picked: torch.Tensor | None = None,  # [G, T, K]
    ) -> torch.Tensor:
        return sdpa.attend(self.pools, layer, query, key, value, inputs, how, sinks, picked)

    def pick(
        self,
        layer: int,
        key: torch.Tensor,  # [T, D]
        inputs: StepInputs,
        rule: picking.Rule,
    ) -> torch.Tensor:
        self.indexers.add(rule.query.shape[1:])
        return picking.pick(self.pools, layer, key, inputs, rule)

    def earlier(
        self,
        layer: int,
        rows: torch.Tensor,  # [T, W]
        inputs: StepInputs,
        count: int,
    ) -> torch.Tensor:
        self.pools.copy_slots(layer, inputs.moves)
        self.pools.write_rows(layer, rows, inputs.slots)
        slots, missing = inputs.earlier(count)
        return self.pools.rows(layer, slots).masked_fill_(missing[..., None], 0)

    def carry_on(
        self,
        layer: int,
        which: RecurrentLayer,
        rows: torch.Tensor,  # [T, W]
        inputs: StepInputs,
    ) -> list[torch.Tensor]:
        assert self.states is not None
        return self.states.carry_on(layer, which, rows, inputs.states)

    def batch_rows(self) -> None:
        self.row_batching = found = invariance.row_batching(self.layers.values())
        self._shown = None if found is None else (found, torch.get_num_threads())

    def keeps_bits(self) -> bool:
        if self.indexers:
            if not picking.keeps_bits(self.indexers):
                return False
        elif self.states is None:
            self.panel = invariance.panel(self.layers.values(), self.row_batching)
        if self._shown == (self.row_batching, torch.get_num_threads()):  # batch_rows has just tried it
            return True
        return invariance.attention_keeps_bits(self.layers.values(), self.row_batching)

    def resized(self, num_blocks: int, num_states: int = 0) -> GatheredAttention:
        pools = self.pools.resized(num_blocks)
        states = None if self.states is None else self.states.resized(num_states, num_blocks)
        return GatheredAttention(pools, self._device, self._dtype, self.row_batching, self.panel, states)
