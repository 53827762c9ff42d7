"""Layers of Mamba-2 (Nemotron-H, Granite 4 H, Bamba, Falcon-H1), token by token.

Dao, Gu: Transformers are SSMs, https://arxiv.org/abs/2405.21060
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from outrider.engine.activations import silu, softplus
from outrider.engine.attention import RUNNING
from outrider.engine.native_recurrence import carries, carry
from outrider.engine.recurrent_state import RecurrentLayer, mixes

PARTS = {"act", "conv1d", "in_proj", "norm", "out_proj"}
product = torch.ops.aten.bmm.default  # not for placeless_calls.py: its shape is always the same


class Ready(NamedTuple):
    """What the recurrence needs of n tokens, of each of H heads."""

    kept: torch.Tensor  # [n, H, 1, 1] share of the state that each keeps
    written: torch.Tensor  # [n, H, P, 1]
    place: torch.Tensor  # [n, H, 1, N] where it writes
    look: torch.Tensor  # [n, H, N, 1] where it reads
    own: torch.Tensor  # [n, H, P] what it adds itself


class Mamba2(RecurrentLayer):
    """Stands in the place of transformers' module, whose parts it has."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.in_proj, self.norm, self.out_proj = layer.in_proj, layer.norm, layer.out_proj
        self.layer_idx: int = layer.layer_idx
        self.A_log, self.dt_bias, self.D = layer.A_log, layer.dt_bias, layer.D
        self.heads, self.head_width = layer.num_heads, layer.head_dim
        self.groups, self.depth = layer.n_groups, layer.ssm_state_size
        self.mix_by(layer.conv1d)
        self.state = (self.heads, self.head_width, self.depth)
        self.entering: float = getattr(layer, "ssm_in_multiplier", 1.0)  # as Falcon-H1 has it
        self.register_buffer("scales", getattr(layer, "mup_vector", None), persistent=False)

    def forward(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        """Takes and returns [1, T, H]."""
        if self.entering != 1.0:
            hidden_states = hidden_states * self.entering
        entered = self.in_proj(hidden_states)
        if self.scales is not None:
            entered = entered * self.scales
        width = self.heads * self.head_width
        gate, rows = entered[..., :width], entered[0, :, width:]
        read = torch.stack(RUNNING.get().carry_on(self.layer_idx, self, rows)).view(1, -1, width)
        normed = read * silu(gate.float()) if isinstance(self.norm, nn.Identity) else self.norm(read, gate)
        found: torch.Tensor = self.out_proj(normed.to(hidden_states.dtype))
        return found

    def ready(self, rows: torch.Tensor) -> Ready:
        mixed, width = self.mixed(rows), self.heads * self.head_width
        x, place, look = torch.split(mixed, [width, *[self.groups * self.depth] * 2], dim=1)
        x = x.view(-1, self.heads, self.head_width)
        step = rows[self.before :, self.taps.shape[1] :]
        step = softplus((step + self.dt_bias.to(step.dtype)).float()).to(rows.dtype).float()
        return Ready(
            (-self.A_log.float().exp() * step).exp()[:, :, None, None],
            (x * step[:, :, None])[..., None],
            self._of_heads(place)[:, :, None],
            self._of_heads(look)[..., None],
            x * self.D.float()[:, None],
        )

    def advance(self, ready: Any, tokens: range, state: torch.Tensor) -> list[torch.Tensor]:
        if carries(state):
            given = Ready(*(each[tokens.start : tokens.stop] for each in ready))
            return carry("carry_mamba2", state, given, given.own.shape)
        found = []
        look = torch.empty_like(ready.look[0])  # always as aligned as here: products may depend on it
        for token in tokens:
            state.mul_(ready.kept[token]).addcmul_(ready.written[token], ready.place[token])
            seen = product(state, look.copy_(ready.look[token]))  # [H, P, 1]
            found.append(seen[:, :, 0] + ready.own[token])
        return found

    def _of_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [n, H, N] of what groups of heads share."""
        return x.view(-1, self.groups, self.depth).repeat_interleave(self.heads // self.groups, dim=1)


def is_mamba2(module: Any) -> bool:
    """Returns whether a module is one, by its parts."""
    return (
        mixes(module)
        and {name for name, _ in module.named_children()} == PARTS
        and {name for name, _ in module.named_parameters(recurse=False)} == {"A_log", "D", "dt_bias"}
        and hasattr(module, "time_step_limit")
        and hasattr(module, "ssm_state_size")
    )
