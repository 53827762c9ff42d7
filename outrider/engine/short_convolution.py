"""Layers that mix each token with the few before it, as LFM2 has them between those that attend.

Their own code keeps the last inputs of a sequence as a state that moves on, which cannot be taken back when
a draft is rejected. But each input is its token's own. So here it lies in the pool, in the token's slot, as
keys and values do: rejected tokens, shared prefixes and a session that goes on elsewhere need nothing more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from outrider.engine.attention import RUNNING


class ShortConvolution(nn.Module):
    """Stands in the place of transformers' module, whose parts it has."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.in_proj, self.out_proj = layer.in_proj, layer.out_proj
        self.layer_idx: int = layer.layer_idx
        weight: torch.Tensor = layer.conv.weight  # [W, 1, L]
        self.register_buffer("taps", weight.detach().squeeze(1).T.contiguous(), persistent=False)  # [L, W]
        self.bias = layer.conv.bias

    def forward(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        """Takes and returns [1, T, W]."""
        entering, leaving, inputs = self.in_proj(hidden_states).chunk(3, dim=-1)
        taps: torch.Tensor = self.taps  # type: ignore[assignment]
        seen = RUNNING.get().earlier(self.layer_idx, (entering * inputs)[0], len(taps) - 1)  # [T, L, W]
        # one by one: a sum's order may depend on how many there are
        mixed = seen[:, 0].float() * taps[0].float()
        for place in range(1, len(taps)):
            mixed = mixed + seen[:, place].float() * taps[place].float()
        if self.bias is not None:
            mixed = mixed + self.bias.float()
        found: torch.Tensor = self.out_proj(leaving * mixed.to(leaving.dtype)[None])
        return found


def is_short_convolution(module: Any) -> bool:
    """Returns whether a module is one, by its parts: a depthwise causal convolution between two products."""
    conv, entry = getattr(module, "conv", None), getattr(module, "in_proj", None)
    return (
        type(conv) is nn.Conv1d
        and conv.groups == conv.in_channels == conv.out_channels
        and conv.padding == (conv.kernel_size[0] - 1,)
        and type(entry) is nn.Linear
        and entry.out_features == 3 * conv.in_channels
        and isinstance(getattr(module, "out_proj", None), nn.Linear)
        and {name for name, _ in module.named_children()} == {"conv", "in_proj", "out_proj"}
        and hasattr(module, "layer_idx")
    )


def take_over(model: nn.Module) -> None:
    """Puts this engine's layers into the place of the model's own."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_short_convolution(child):
                setattr(parent, name, ShortConvolution(child))
