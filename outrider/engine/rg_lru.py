"""Layers of the real-gated linear recurrent unit (RecurrentGemma), token by token.

De et al.: Griffin, https://arxiv.org/abs/2402.19427
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from outrider.engine.activations import sigmoid
from outrider.engine.attention import RUNNING
from outrider.engine.recurrent_state import RecurrentLayer, convolves

PARTS = {"linear_y", "linear_x", "linear_out", "conv_1d", "rg_lru", "act_fn"}


class Ready(NamedTuple):
    """What the recurrence needs of n tokens, each [n, W]."""

    kept: torch.Tensor
    written: torch.Tensor


class RgLru(RecurrentLayer):
    """Stands in the place of transformers' module, whose parts it has."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.linear_y, self.act_fn = layer.linear_y, layer.act_fn
        self.linear_x, self.linear_out = layer.linear_x, layer.linear_out
        unit = layer.rg_lru
        self.input_gate, self.input_bias = unit.input_gate_weight, unit.input_gate_bias
        self.recurrent_gate, self.recurrent_bias = unit.recurrent_gate_weight, unit.recurrent_gate_bias
        pace = -8.0 * nn.functional.softplus(unit.recurrent_param.detach())
        self.register_buffer("pace", pace, persistent=False)  # [W]
        self.layer_idx: int = layer.layer_idx
        self.state = (len(pace),)
        self.mix_by(layer.conv_1d)

    def forward(
        self, hidden: torch.Tensor, position_ids: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, None]:
        """Takes and returns [1, T, H]."""
        first = (position_ids[0, :, None] == 0).to(hidden.dtype)
        rows = torch.cat([self.linear_x(hidden)[0], first], 1)
        read = torch.stack(RUNNING.get().carry_on(self.layer_idx, self, rows)).to(hidden.dtype)
        return self.linear_out(read[None] * self.act_fn(self.linear_y(hidden))), None

    def ready(self, rows: torch.Tensor) -> Ready:
        x, first = self.convolved(rows), rows[self.before :, -1:] > 0
        recurrent = self._gate(x, self.recurrent_gate, self.recurrent_bias)
        kept = self.get_buffer("pace") * recurrent
        scale = torch.where(first, 1.0, torch.sqrt(1 - torch.exp(2 * kept)))
        written = x * self._gate(x, self.input_gate, self.input_bias) * scale
        return Ready(kept.exp().float(), written.float())

    def advance(self, ready: Any, tokens: range, state: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for token in tokens:
            state.mul_(ready.kept[token]).add_(ready.written[token])
            found.append(state.clone())
        return found

    def _gate(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        heads, width = bias.shape
        # placeless_calls.py knows bmm, and gives a row its own bits there
        sums = torch.bmm(x.view(-1, heads, width).transpose(0, 1), weight) + bias[:, None]
        return sigmoid(sums.transpose(0, 1).reshape(x.shape))


def is_rg_lru(module: Any) -> bool:
    """Returns whether a module is one, by its parts."""
    return {name for name, _ in module.named_children()} == PARTS and convolves(module.conv_1d)
