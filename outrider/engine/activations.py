"""Activations on CPU whose numbers do not depend on where in the batch they stand.

torch's sigmoid, softplus, silu and gelu take a vector of numbers at a time and what is left over one by one,
and the two round differently; where the leftovers lie follows from the batch's size and from the number of
threads. exp, log1p, erf and tanh give the same bits either way (as do sums and products), so the activations
are put together from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from transformers.activations import GELUActivation, GELUTanh, SiLUActivation

VECTORS = 32  # numbers: what torch's kernels take at a time is that or a part of it
MOST_AT_ONCE = 2**15  # numbers: more of them torch divides among threads
torchs_silu: Callable[[torch.Tensor], torch.Tensor] = (
    torch.ops.aten.silu.default
)  # not for placeless_calls.py
ONE = torch.tensor(1.0)  # of a number of Python's own each operation makes one, which takes longer


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x))"""
    return x.neg().exp_().add_(1.0).reciprocal_()


def softplus(x: torch.Tensor, beta: float = 1.0, threshold: float = 20.0) -> torch.Tensor:
    """log(1 + exp(beta x)) / beta, or x itself where beta x is above the threshold"""
    scaled = x * beta
    return torch.where(scaled > threshold, x, scaled.exp().log1p_().div_(beta))


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x))"""
    scratch = x.neg().exp_().add_(ONE)
    return torch.div(x, scratch, out=scratch)


def silu_of_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns silu of tokens' rows [..., W], each contiguous, in few operations: torch's own where that takes
    a row by whole vectors, in one thread. The width alone decides which way it is."""
    width = x.shape[-1]
    if width % VECTORS or width > MOST_AT_ONCE:
        return silu(x)
    if x.numel() <= MOST_AT_ONCE or torch.get_num_threads() == 1:
        return torchs_silu(x)
    rows = x.reshape(-1, width)
    return torch.cat([torchs_silu(some) for some in torch.split(rows, MOST_AT_ONCE // width)]).view(x.shape)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x / 2 * (1 + erf(x / sqrt(2)))"""
    return (x * math.sqrt(0.5)).erf_().add_(1.0).mul_(x).mul_(0.5)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))"""
    scratch = (x * x).mul_(x).mul_(0.044715).add_(x).mul_(math.sqrt(2.0 / math.pi))
    return scratch.tanh_().add_(1.0).mul_(x).mul_(0.5)


class PlacelessActivation(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def placeless(module: nn.Module) -> nn.Module | None:
    """Returns what to put in the place of an activation whose bits depend on the place; None for any other
    module."""
    if isinstance(module, (SiLUActivation, nn.SiLU)):
        return PlacelessActivation(silu)
    if isinstance(module, nn.Sigmoid):
        return PlacelessActivation(sigmoid)
    if isinstance(module, GELUTanh) or (isinstance(module, nn.GELU) and module.approximate == "tanh"):
        return PlacelessActivation(gelu_tanh)
    if isinstance(module, (GELUActivation, nn.GELU)):
        return PlacelessActivation(gelu)
    return None
