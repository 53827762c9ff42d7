"""Layers of RWKV, token by token: what mixes tokens over time, and the look at the token before.

Peng et al.: RWKV, https://arxiv.org/abs/2305.13048
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from outrider.engine.activations import sigmoid
from outrider.engine.attention import RUNNING
from outrider.engine.recurrent_state import RecurrentLayer

PARTS = {"time_shift", "key", "value", "receptance", "output"}
NOTHING = -1e38  # the largest exponent of no token


class Ready(NamedTuple):
    """What the recurrence needs of n tokens, each [n, W]."""

    key: torch.Tensor
    value: torch.Tensor
    receptance: torch.Tensor


class TimeMix(RecurrentLayer):
    """Stands in the place of transformers' module, whose parts it has.

    Its state is a mean of the values so far, weighed by powers of e: sum, weight, and the largest power, by
    which both are divided."""

    before = 1

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.key, self.value, self.receptance = layer.key, layer.value, layer.receptance
        self.output, self.first = layer.output, layer.time_first  # [W]
        self.mix_key, self.mix_value = layer.time_mix_key[0], layer.time_mix_value[0]  # [1, H]
        self.mix_receptance = layer.time_mix_receptance[0]
        self.register_buffer("pace", -layer.time_decay.detach().exp(), persistent=False)  # [W]
        self.layer_idx: int = layer.layer_idx
        self.state = (3, len(layer.time_first))

    def blank(self, like: torch.Tensor) -> torch.Tensor:
        state = super().blank(like)
        state[2] = NOTHING
        return state

    def forward(self, hidden: torch.Tensor, state: None = None, **_: object) -> tuple[torch.Tensor, None]:
        """Takes and returns [1, T, H], and the state that the model's own code would carry on: none."""
        read = torch.stack(RUNNING.get().carry_on(self.layer_idx, self, hidden[0]))
        return self.output(read[None]), state

    def ready(self, rows: torch.Tensor) -> Ready:
        before, now = rows[:-1], rows[1:]
        key, value, receptance = (
            now * mix + before * (1 - mix) for mix in (self.mix_key, self.mix_value, self.mix_receptance)
        )
        return Ready(self.key(key).float(), self.value(value), sigmoid(self.receptance(receptance)))

    def advance(self, ready: Any, tokens: range, state: torch.Tensor) -> list[torch.Tensor]:
        found, (total, weight, power) = [], state
        for token in tokens:
            key, value, receptance = ready.key[token], ready.value[token], ready.receptance[token]
            own = key + self.first
            largest = torch.maximum(power, own)
            old, new = torch.exp(power - largest), torch.exp(own - largest)
            read = (old * total + new * value) / (old * weight + new)
            found.append(receptance * read.to(receptance.dtype))
            faded = power + self.pace
            largest = torch.maximum(faded, key)
            old, new = torch.exp(faded - largest), torch.exp(key - largest)
            total.mul_(old).add_(new * value)
            weight.mul_(old).add_(new)
            power.copy_(largest)
        return found


class TokenShift(nn.Module):
    """Gives the rows of the tokens before, which lie in the pool, as those of short convolutions do."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer_idx = layer

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Takes and returns [1, T, H]."""
        return RUNNING.get().earlier(self.layer_idx, hidden[0], 1)[None, :, 0]


def is_time_mix(module: Any) -> bool:
    """Returns whether a module is one, by its parts."""
    return {name for name, _ in module.named_children()} == PARTS and hasattr(module, "time_decay")


def shift_by_pool(model: nn.Module) -> None:
    """Lets layers between those, which look at the token before, too, do that in this engine's way."""
    for module in model.modules():
        if isinstance(getattr(module, "time_shift", None), nn.ZeroPad2d):
            module.time_shift = TokenShift(module.layer_id)  # type: ignore[arg-type]
