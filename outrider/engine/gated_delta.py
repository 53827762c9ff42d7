"""Layers of linear attention by the gated delta rule (Qwen3-Next, Qwen3.5, OLMo Hybrid), and by that whose
decay is of each channel (Kimi Linear, Ling 3).

Their own code computes chunks of 64 tokens at a time, from wherever a forward pass begins, and a token alone
in another way, which rounds otherwise. Here each token is computed alone, always in the same way.

Yang, Kautz, Hatamizadeh: Gated Delta Networks, https://arxiv.org/abs/2412.06464
Kimi Team: Kimi Linear, https://arxiv.org/abs/2510.26692
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from outrider.engine.activations import sigmoid, softplus
from outrider.engine.attention import RUNNING
from outrider.engine.native_recurrence import carries, carry
from outrider.engine.recurrent_state import RecurrentLayer, mixes

EPS = 1e-6  # of the norm of queries and keys
product = torch.ops.aten.bmm.default  # not for placeless_calls.py: its shape is always the same


class Entering(NamedTuple):
    """What the projections make of hidden states [1, T, H]."""

    mixed: torch.Tensor  # [1, T, 2 * Hk * Dk + Hv * Dv] queries, keys and values, before they are mixed
    gate: torch.Tensor  # [1, T, Hv * Dv] of the output
    strength: torch.Tensor  # [1, T, Hv] of the writing
    decay: torch.Tensor  # [1, T, Hv * E], E = 1, or Dk if it is of each channel


class Ready(NamedTuple):
    """What the rule needs of n tokens."""

    looking: torch.Tensor  # [n, Hv, 2, Dk] key and query
    values: torch.Tensor  # [n, Hv, Dv]
    kept: torch.Tensor  # [n, Hv, E, 1] share of the state that each keeps
    strength: torch.Tensor  # [n, Hv, 1]
    own: torch.Tensor  # [n, Hv, 1] of what a token writes, how much it reads itself


class GatedDelta(RecurrentLayer):
    """Stands in the place of transformers' module, whose parts it has."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        for name, child in layer.named_children():
            if name != "conv1d":
                setattr(self, name, child)
        self.layer_idx: int = layer.layer_idx
        decays = getattr(layer, "forget_gate", layer)  # the part that has what the decay follows from
        self.A_log, self.dt_bias = decays.A_log, decays.dt_bias
        self.fastest = (
            decays.lower_bound if getattr(decays, "safe_gate", False) else None
        )  # decay, a logarithm
        self.key_heads = getattr(layer, "num_k_heads", None) or layer.num_heads
        self.value_heads = getattr(layer, "num_v_heads", None) or layer.num_heads
        self.key_width = getattr(layer, "head_k_dim", None) or layer.head_dim
        self.value_width = getattr(layer, "head_v_dim", None) or layer.head_dim
        self.most_strength = 2.0 if getattr(layer, "allow_neg_eigval", False) else 1.0
        self.mix_by(layer.conv1d)
        self.state = (self.value_heads, self.key_width, self.value_width)
        self._entering, norm, out = KINDS[_parts(layer)]
        self._norm, self._out = norm, out

    def forward(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        """Takes and returns [1, T, H]."""
        entering = self._entering(self, hidden_states)
        rows = torch.cat([entering.mixed, entering.strength, entering.decay], dim=-1)[0]
        read = torch.stack(RUNNING.get().carry_on(self.layer_idx, self, rows))  # [T, Hv, Dv]
        read = read.to(hidden_states.dtype).view(-1, self.value_width)
        normed = getattr(self, self._norm)(read, entering.gate.reshape(-1, self.value_width))
        found: torch.Tensor = getattr(self, self._out)(normed.view(1, len(rows), -1))
        return found

    def ready(self, rows: torch.Tensor) -> Ready:
        count, width = len(rows) - self.before, self.taps.shape[1]
        mixed, keys_width = self.mixed(rows), self.key_heads * self.key_width
        query, key, values = torch.split(mixed, [keys_width, keys_width, width - 2 * keys_width], dim=1)
        query, key = self._normed(query), self._normed(key)
        query = query * self.key_width**-0.5
        strength, decay = rows[self.before :, width:].tensor_split([self.value_heads], dim=1)
        return Ready(
            torch.stack([key, query], dim=2),
            values.view(count, self.value_heads, self.value_width),
            self._decay(decay.float()).exp()[..., None],
            (sigmoid(strength.float()).to(rows.dtype).float() * self.most_strength)[:, :, None],
            (key * query).sum(-1, keepdim=True),
        )

    def advance(self, ready: Any, tokens: range, state: torch.Tensor) -> list[torch.Tensor]:
        if carries(state):
            given = Ready(*(each[tokens.start : tokens.stop] for each in ready))
            return carry("carry_gated_delta", state, given, given.values.shape, given.kept.shape[2])
        found = []
        looking = torch.empty_like(ready.looking[0])  # always as aligned as here: products may depend on it
        for token in tokens:
            state.mul_(ready.kept[token])
            seen = product(looking.copy_(ready.looking[token]), state)  # [Hv, 2, Dv]
            written = (ready.values[token] - seen[:, 0]).mul_(ready.strength[token])
            state.addcmul_(looking[:, 0, :, None], written[:, None])
            found.append(seen[:, 1] + written * ready.own[token])
        return found

    def _decay(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the logarithm of what is kept, [n, Hv, E]."""
        x = (x + self.dt_bias.float()).view(len(x), self.value_heads, -1)
        rate: torch.Tensor = self.A_log.float().exp().view(-1, 1)
        return -rate * softplus(x) if self.fastest is None else self.fastest * sigmoid(rate * x)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [n, Hv, Dk], one for each head of values."""
        x = x.view(len(x), self.key_heads, self.key_width)
        x = x * ((x * x).sum(-1, keepdim=True) + EPS).rsqrt()
        return x.repeat_interleave(self.value_heads // self.key_heads, dim=1)


def is_gated_delta(module: Any) -> bool:
    """Returns whether a module is one, by its parts."""
    return (
        mixes(module)
        and _parts(module) in KINDS
        and hasattr(getattr(module, "forget_gate", module), "A_log")
        and hasattr(module, "layer_idx")
    )


def _parts(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, _ in module.named_children()) - {"conv1d"}


def _of_key_heads(layer: Any, x: torch.Tensor) -> Entering:
    """Returns what enters a layer of Qwen3-Next: its projections' outputs are sorted by key heads."""
    width, shared = layer.key_width, layer.value_heads // layer.key_heads
    values = shared * layer.value_width
    of_heads = layer.in_proj_qkvz(x).view(*x.shape[:2], layer.key_heads, -1)
    query, key, value, gate = of_heads.split([width, width, values, values], dim=3)
    strength, decay = layer.in_proj_ba(x).view(*x.shape[:2], layer.key_heads, -1).chunk(2, dim=3)
    mixed = torch.cat([each.flatten(2) for each in (query, key, value)], dim=2)
    return Entering(mixed, gate.flatten(2), strength.flatten(2), decay.flatten(2))


def _of_kinds(layer: Any, x: torch.Tensor) -> Entering:
    """Returns what enters a layer of Qwen3.5."""
    return Entering(layer.in_proj_qkv(x), layer.in_proj_z(x), layer.in_proj_b(x), layer.in_proj_a(x))


def _of_each(layer: Any, x: torch.Tensor) -> Entering:
    """Returns what enters a layer of OLMo Hybrid."""
    mixed = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], dim=-1)
    return Entering(mixed, layer.g_proj(x), layer.b_proj(x), layer.a_proj(x))


def _of_channels(layer: Any, x: torch.Tensor) -> Entering:
    """Returns what enters a layer of Kimi Linear: gate and decay are products of two low ranks."""
    mixed = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], dim=-1)
    decay = layer.forget_gate.f_b_proj(layer.forget_gate.f_a_proj(x))
    return Entering(mixed, layer.g_b_proj(layer.g_a_proj(x)), layer.b_proj(x), decay)


def _of_whole_channels(layer: Any, x: torch.Tensor) -> Entering:
    """Returns what enters a layer of Ling 3."""
    mixed = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], dim=-1)
    return Entering(mixed, layer.g_proj(x), layer.b_proj(x), layer.forget_gate.f_proj(x))


# By the names of a layer's parts: how its hidden states enter, the norm of what leaves, and its projection.
KINDS: dict[frozenset[str], tuple[Callable[[Any, torch.Tensor], Entering], str, str]] = {
    frozenset({"in_proj_qkvz", "in_proj_ba", "norm", "out_proj"}): (_of_key_heads, "norm", "out_proj"),
    frozenset({"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "norm", "out_proj"}): (
        _of_kinds,
        "norm",
        "out_proj",
    ),
    frozenset({"q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "o_norm", "o_proj"}): (
        _of_each,
        "o_norm",
        "o_proj",
    ),
    frozenset(
        {"q_proj", "k_proj", "v_proj", "forget_gate", "b_proj", "g_a_proj", "g_b_proj", "o_norm", "o_proj"}
    ): (_of_channels, "o_norm", "o_proj"),
    frozenset({"q_proj", "k_proj", "v_proj", "forget_gate", "b_proj", "g_proj", "o_norm", "o_proj"}): (
        _of_whole_channels,
        "o_norm",
        "o_proj",
    ),
}
