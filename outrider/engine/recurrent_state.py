"""Layers with a recurrent state, and the memory for it: a state and the rows of a few tokens in each slot.

A layer's state is carried on token by token, by operations on one session's state alone: so it has the same
bits however the text came, in whatever company. Rows are what the layer needs of a token to do that, and to
mix it with the few tokens before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from outrider.engine.activations import silu
from outrider.engine.state_slots import MOST_DRAFTS, NO_SLOT, StateSlots, Turn
from outrider.engine.step_inputs import Work

MOST_BEFORE = 7  # tokens that a layer mixes with the one after them
PROBE_SLOTS = 8
ROWS = MOST_DRAFTS + MOST_BEFORE  # in a slot: that of position p at p % ROWS


class RecurrentLayer(nn.Module, ABC):
    """A layer that has a state of all tokens before."""

    state: tuple[int, ...]  # shape of the state, which is float32
    before = 0  # tokens before each that it looks at by themselves; at most MOST_BEFORE
    taps: torch.Tensor  # [before + 1, W] by which it mixes them, if it does

    def blank(self, like: torch.Tensor) -> torch.Tensor:
        """Returns the state of no text, where another tensor lies."""
        return like.new_zeros(self.state)

    def mix_by(self, convolution: nn.Conv1d) -> None:
        """Takes over how a layer mixes each token with those before it."""
        weight = convolution.weight.detach()  # [W, 1, before + 1]
        self.register_buffer("taps", weight.squeeze(1).T.contiguous(), persistent=False)
        self.taps_bias = convolution.bias
        self.before = weight.shape[2] - 1

    def convolved(self, rows: torch.Tensor) -> torch.Tensor:
        """Mixes each token with the ones before it: of rows [before + n, at least W], [n, W]."""
        count, width = len(rows) - self.before, self.taps.shape[1]
        # one by one: a sum's order may depend on how many there are
        found = rows[:count, :width].float() * self.taps[0].float()
        for place in range(1, len(self.taps)):
            found = found + rows[place : place + count, :width].float() * self.taps[place].float()
        if self.taps_bias is not None:
            found = found + self.taps_bias.float()
        return found.to(rows.dtype)

    def mixed(self, rows: torch.Tensor) -> torch.Tensor:
        """The same, activated by silu, in float32."""
        return silu(self.convolved(rows).float()).to(rows.dtype).float()

    @abstractmethod
    def ready(self, rows: torch.Tensor) -> Any:
        """Returns what `advance` needs of rows [before + n, W], whose first ones are those of the tokens
        before."""

    @abstractmethod
    def advance(self, ready: Any, tokens: range, state: torch.Tensor) -> list[torch.Tensor]:
        """Carries a state on, in place, over some of the n tokens, and returns what each one reads of it."""


@dataclass(frozen=True, slots=True)
class StateStep:
    """What a step does with states, on the device."""

    turns: Sequence[Turn]
    tokens: Sequence[slice]  # of the step, of each turn
    seen: Sequence[torch.Tensor]  # [MOST_BEFORE + n] places of rows from MOST_BEFORE before the source's end


class RecurrentStates:
    """The states of all layers."""

    def __init__(self, slots: int, num_blocks: int, block_size: int) -> None:
        self.slots = StateSlots(slots, num_blocks, block_size)
        self._block_size = block_size
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # [slots + 1, ...] states, rows

    @classmethod
    def of(cls, model: nn.Module, num_blocks: int, block_size: int) -> Self | None:
        """Returns a few slots for a model that is only tried; None if it keeps no state."""
        if any(isinstance(module, RecurrentLayer) for module in model.modules()):
            return cls(PROBE_SLOTS, num_blocks, block_size)
        return None

    @property
    def bytes_per_slot(self) -> int:
        """Over all layers seen so far."""
        memory = [each for layer in self._layers.values() for each in layer]
        return sum(each.numel() * each.element_size() for each in memory) // (self.slots.slots + 1)

    def resized(self, slots: int, num_blocks: int) -> Self:
        """Returns the same for the same layers with so many empty slots, whose memory is taken at once."""
        found = type(self)(slots, num_blocks, self._block_size)
        for layer, (states, rows) in self._layers.items():
            found._layers[layer] = found._new(states[0]), found._new(rows[0])
        return found

    def prepare(self, works: Sequence[Work], ends: Sequence[int], device: torch.device) -> StateStep:
        """`works` have their turns; `ends`: of each one's tokens in the step."""
        turns = [work.turn for work in works if work.turn is not None]
        tokens = [slice(end - turn.tokens, end) for turn, end in zip(turns, ends, strict=True)]
        positions = [
            torch.arange(turn.length - MOST_BEFORE, turn.start + turn.tokens, device=device) for turn in turns
        ]
        return StateStep(turns, tokens, [each % ROWS for each in positions])

    def carry_on(
        self, layer: int, which: RecurrentLayer, rows: torch.Tensor, step: StateStep
    ) -> list[torch.Tensor]:
        """Returns what each of the step's tokens, whose rows [T, W] these are, reads of the state up to
        itself; keeps what is to be kept."""
        if layer not in self._layers:
            like = torch.zeros(which.state, device=rows.device)
            self._layers[layer] = self._new(like), self._new(rows.new_zeros(ROWS, rows.shape[1]))
        states, kept = self._layers[layer]
        found = [torch.empty(0)] * len(rows)
        for turn, tokens, seen in zip(step.turns, step.tokens, step.seen, strict=True):
            seen = seen[MOST_BEFORE - which.before :]
            known = len(seen) - turn.tokens  # rows that are known from the steps before
            if turn.source == NO_SLOT:
                state = which.blank(states)
                given = torch.cat([rows.new_zeros(known, rows.shape[1]), rows[tokens]])
            else:
                state = states[turn.source].clone()
                given = torch.cat([kept[turn.source, seen[:known]], rows[tokens]])
            ready = which.ready(given)
            outputs, done = [], 0
            for slot, length in ((turn.mark, turn.marked), (turn.target, turn.until)):
                if slot == NO_SLOT:
                    continue
                outputs += which.advance(ready, range(done, length - turn.length), state)
                done = length - turn.length
                if slot != turn.source or length != turn.length:
                    states[slot] = state
                last = done + which.before if slot == turn.mark else len(seen)
                kept[slot].index_copy_(0, seen[done:last], given[done:last])
            outputs += which.advance(ready, range(done, len(seen) - which.before), state)
            found[tokens] = outputs[-turn.tokens :]
        return found

    def _new(self, like: torch.Tensor) -> torch.Tensor:
        """Zeros, written at once: see KvPools."""
        return torch.zeros(self.slots.slots + 1, *like.shape, dtype=like.dtype, device=like.device).zero_()


def mixes(layer: Any) -> bool:
    """Returns whether a layer of a model has a convolution that `mix_by` takes over, and activates it."""
    return convolves(getattr(layer, "conv1d", None)) and getattr(layer, "activation", None) == "silu"


def convolves(conv: Any) -> bool:
    """Returns whether a part of a layer is a convolution that `mix_by` takes over."""
    return (
        type(conv) is nn.Conv1d
        and conv.groups == conv.in_channels == conv.out_channels
        and 1 < conv.kernel_size[0] <= MOST_BEFORE + 1
    )
