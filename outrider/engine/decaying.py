"""Layers of linear attention whose heads forget at a constant pace (MiniMax-01), token by token.

Qin et al.: Lightning Attention-2, https://arxiv.org/abs/2401.04658
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from outrider.engine.activations import sigmoid
from outrider.engine.attention import RUNNING
from outrider.engine.recurrent_state import RecurrentLayer

PARTS = {"act_fn", "norm", "qkv_proj", "out_proj", "output_gate"}
product = torch.ops.aten.bmm.default  # not for placeless_calls.py: its shape is always the same


class Decaying(RecurrentLayer):
    """Stands in the place of transformers' module, whose parts it has."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.act_fn, self.norm, self.qkv_proj = layer.act_fn, layer.norm, layer.qkv_proj
        self.out_proj, self.output_gate = layer.out_proj, layer.output_gate
        self.layer_idx: int = layer.layer_idx
        self.heads, self.width = layer.num_attention_heads, layer.head_dim
        self.state = (self.heads, self.width, self.width)
        self.register_buffer("kept", (-layer.slope_rate.float()).exp(), persistent=False)  # [H, 1, 1]

    def forward(self, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        """Takes and returns [1, T, H], and no weights."""
        rows = self.act_fn(self.qkv_proj(hidden_states))[0]
        read = torch.stack(RUNNING.get().carry_on(self.layer_idx, self, rows))  # [T, H, D]
        normed = self.norm(read.to(hidden_states.dtype).view(1, len(rows), -1))
        found: torch.Tensor = self.out_proj(sigmoid(self.output_gate(hidden_states)) * normed)
        return found, None

    def ready(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns queries, keys and values of each head: [n, H, 3, D]."""
        return rows.float().view(len(rows), self.heads, 3, self.width)

    def advance(self, ready: Any, tokens: range, state: torch.Tensor) -> list[torch.Tensor]:
        kept: torch.Tensor = self.kept  # type: ignore[assignment]
        found = []
        looking = torch.empty_like(ready[0, :, :1])  # always as aligned as here: products may depend on it
        for token in tokens:
            _, key, value = ready[token].unbind(1)
            state.mul_(kept).addcmul_(key[:, :, None], value[:, None])
            seen = product(looking.copy_(ready[token, :, :1]), state)  # [H, 1, D]
            found.append(seen[:, 0])
        return found


def is_decaying(module: nn.Module) -> bool:
    """Returns whether a module is one, by its parts."""
    return {name for name, _ in module.named_children()} == PARTS and hasattr(module, "slope_rate")
