"""Layers of Mamba (Mamba, Falcon Mamba, Jamba), token by token.

Gu, Dao: Mamba, https://arxiv.org/abs/2312.00752
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from outrider.engine.activations import silu, softplus
from outrider.engine.attention import RUNNING
from outrider.engine.recurrent_state import RecurrentLayer, mixes

PARTS = {"act", "conv1d", "in_proj", "x_proj", "dt_proj", "out_proj"}
NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")  # of Falcon Mamba and Jamba
product = torch.ops.aten.bmm.default  # not for placeless_calls.py: its shape is always the same


class Ready(NamedTuple):
    """What the recurrence needs of n tokens."""

    step: torch.Tensor  # [n, W, 1]
    written: torch.Tensor  # [n, W, 1]
    place: torch.Tensor  # [n, N] where it writes
    look: torch.Tensor  # [n, 1, N, 1] where it reads
    own: torch.Tensor  # [n, W] what it adds itself


class Mamba(RecurrentLayer):
    """Stands in the place of transformers' module, whose parts it has."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.in_proj, self.x_proj, self.out_proj = layer.in_proj, layer.x_proj, layer.out_proj
        # Its own code takes the weight alone, too, and adds the bias in float32.
        rank, width = layer.dt_proj.in_features, layer.dt_proj.out_features
        self.dt_proj = nn.Linear(rank, width, bias=False, device="meta")
        self.dt_proj.weight = layer.dt_proj.weight
        self.dt_bias, self.D = layer.dt_proj.bias, layer.D
        self.norms = nn.ModuleList([getattr(layer, name, nn.Identity()) for name in NORMS])
        self.register_buffer("decay", -layer.A_log.detach().float().exp(), persistent=False)  # [W, N]
        self.layer_idx: int = layer.layer_idx
        self.state = (width, layer.ssm_state_size)
        self.parts = [rank, layer.ssm_state_size, layer.ssm_state_size]
        self.mix_by(layer.conv1d)

    def forward(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        """Takes and returns [1, T, H]."""
        rows, gate = self.in_proj(hidden_states)[0].chunk(2, dim=-1)
        read = torch.stack(RUNNING.get().carry_on(self.layer_idx, self, rows))  # [T, W]
        found: torch.Tensor = self.out_proj((read * silu(gate.float())).to(hidden_states.dtype)[None])
        return found

    def ready(self, rows: torch.Tensor) -> Ready:
        x = self.mixed(rows)
        entered = torch.split(self.x_proj(x.to(rows.dtype)), self.parts, dim=1)
        step, place, look = (norm(each) for norm, each in zip(self.norms, entered, strict=True))
        step = softplus(self.dt_proj(step).float() + self.dt_bias.float())[..., None]
        own, look = x * self.D.float(), look.float()[:, None, :, None]
        return Ready(step, x[..., None] * step, place.float(), look, own)

    def advance(self, ready: Any, tokens: range, state: torch.Tensor) -> list[torch.Tensor]:
        found, decay = [], self.decay
        look = torch.empty_like(ready.look[0])  # always as aligned as here: products may depend on it
        for token in tokens:
            kept = (decay * ready.step[token]).exp_()
            state.mul_(kept).addcmul_(ready.written[token], ready.place[token])
            seen = product(state[None], look.copy_(ready.look[token]))  # [1, W, 1]
            found.append(seen[0, :, 0] + ready.own[token])
        return found


def is_mamba(module: Any) -> bool:
    """Returns whether a module is one, by its parts."""
    return (
        mixes(module)
        and {name for name, _ in module.named_children()} - {*NORMS} == PARTS
        and type(module.dt_proj) is nn.Linear
        and {name for name, _ in module.named_parameters(recurse=False)} == {"A_log", "D"}
        and hasattr(module, "ssm_state_size")
    )
