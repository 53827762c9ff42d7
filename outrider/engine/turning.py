"""A decoder turned so that no channel of its activations stands out: it computes the same, and one scale
fits all numbers of a row.

What passes from layer to layer has a few channels far above the rest. A norm whose weights are all one treats
all directions alike. So these weights go into the layers behind it, and everything that writes or reads the
stream of a token is turned, once, at load: each channel gets a share of all. What the last products of
attention and MLP read stays as it is. (Ashkboos et al., QuaRot, arXiv 2404.00456.)
"""

from __future__ import annotations

import math
from collections.abc import Set
from typing import Any

import torch
from torch import nn

from outrider.engine.packed import PackedColumns
from outrider.engine.plain_pass import is_usual

SEED = 9
ROWS = 4096  # turned at a time, in double precision: whatever does it, the weights are rounded to the same


class Turn:
    """Multiplies rows by an orthogonal matrix: random signs, then the product of two small Hartley
    transforms, whose entries are all of about one size."""

    def __init__(self, width: int) -> None:
        self.width = width
        first = max(size for size in range(1, math.isqrt(width) + 1) if width % size == 0)
        self._first, self._second = hartley(first), hartley(width // first)
        signs = torch.randint(2, (width,), generator=torch.Generator().manual_seed(SEED))
        self._signs = signs.double() * 2 - 1

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x [..., width] turned, in its own number format."""
        turned = torch.empty_like(x, memory_format=torch.contiguous_format)
        parts = (torch.split(rows.view(-1, self.width), ROWS) for rows in (turned, x.contiguous()))
        for to, part in zip(*parts, strict=True):
            to.copy_(self._turned(part))
        return turned

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """Returns rows x [..., width] as they were before they were turned."""
        split = x.double().view(-1, len(self._first), len(self._second))
        found = (self._first @ split @ self._second).view(-1, self.width) * self._signs
        return found.view(x.shape).to(x.dtype)

    def columns(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a weight [width, n] whose products are turned."""
        return self.rows(x.T).T.contiguous()

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        split = (x.double() * self._signs).view(-1, len(self._first), len(self._second))
        return (self._first @ split @ self._second).view(x.shape).to(x.dtype)


def hartley(size: int) -> torch.Tensor:
    """Returns a symmetric orthogonal matrix [size, size]."""
    places = torch.arange(size)
    angles = (places[:, None] * places % size).double() * (2 * math.pi / size)
    return (angles.cos() + angles.sin()) / math.sqrt(size)


@torch.no_grad()
def turn(model: Any, bare: Set[nn.Module] = frozenset()) -> set[nn.Module]:
    """Turns a model of the usual kind; returns the linear layers inside for whose inputs one scale is enough,
    which are none if it is of another kind. `bare`: layers that have to stay."""
    if not is_usual(model, nn.Linear) or any(isinstance(each, nn.Linear) for each in bare):
        return set()
    decoder, head = model.base_model, model.get_output_embeddings()
    stream = Turn(decoder.embed_tokens.embedding_dim)
    found: set[nn.Module] = set()
    model.turned = stream, decoder.norm.weight.detach().clone()  # for who reads the stream beside it
    _read(decoder.norm, [head], stream)
    decoder.embed_tokens.weight = _kept(stream.rows(decoder.embed_tokens.weight))
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        inner = [attention.q_proj, attention.k_proj, attention.v_proj]
        _read(layer.input_layernorm, inner, stream)
        _read(layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj], stream)
        for linear in (attention.o_proj, mlp.down_proj):
            linear.weight = _kept(stream.columns(linear.weight))
            if linear.bias is not None:
                linear.bias = _kept(stream.rows(linear.bias))
        found.update(inner, (mlp.gate_proj, mlp.up_proj))
    return found


def fold_norms(model: Any) -> None:
    """Lets the layers that are packed for even inputs do the work of the norms before them."""
    if not is_usual(model, PackedColumns):
        return
    for layer in model.base_model.layers:
        for name, inner in (
            ("input_layernorm", layer.self_attn.q_proj),
            ("post_attention_layernorm", layer.mlp.gate_proj),
        ):
            inner.together.linear.norm(getattr(layer, name).eps)
            setattr(layer, name, nn.Identity())


def _read(norm: Any, linears: list[nn.Linear], stream: Turn) -> None:
    """Lets linear layers behind a norm read the turned stream: its weights become theirs."""
    for linear in linears:
        linear.weight = _kept(stream.rows(linear.weight * norm.weight))
    norm.weight = _kept(torch.ones_like(norm.weight))


def _kept(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)
