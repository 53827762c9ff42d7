"""How models learn: their optimisers, and the rates over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from outrider.engine.packed import packs


def optimisers(model: nn.Module, matrix_rate: float, other_rate: float) -> list[Optimizer]:
    """Returns Muon for the matrices inside the layers, AdamW for the (tied) embedding and the norms.

    Muon (Jordan et al. 2024) orthogonalises each matrix's update; with the step scaled to AdamW's usual
    size it needs fewer tokens for the same loss, which counts where every token is computed on a CPU.
    """
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "layers" in name else others).append(parameter)
    return [
        torch.optim.Muon(
            matrices, lr=matrix_rate, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class _InFloat32(TorchFunctionMode):
    """Muon's own products, which are in bfloat16 else: a processor without instructions for it takes some
    ten times as long for these."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].clone() if func is torch.Tensor.bfloat16 else func(*args, **(kwargs or {}))


class Schedule:
    """Takes the steps, with clipped gradients: the rate warms up linearly, then falls by a cosine."""

    def __init__(
        self, opts: Sequence[Optimizer], model: nn.Module, steps: int, warmup: int, final: float = 0.02
    ) -> None:
        self.opts, self.model = list(opts), model
        self.steps, self.warmup, self.final = steps, warmup, final
        self.peaks = [[float(group["lr"]) for group in opt.param_groups] for opt in self.opts]
        self.taken = 0
        self.least_done = 0.0  # share of the schedule that is over, whatever was taken: for a bound of time

    def factor(self) -> float:
        """Returns the share of the peak learning rate that the next step uses."""
        if self.taken < self.warmup:
            return (self.taken + 1) / self.warmup
        taken = (self.taken - self.warmup) / max(1, self.steps - self.warmup)
        done = min(1.0, max(taken, self.least_done))
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done))

    def step(self, clip: float = 1.0) -> None:
        """Applies the gradients that have been added up, then clears them."""
        nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        factor = self.factor()
        for opt, peaks in zip(self.opts, self.peaks, strict=True):
            for group, peak in zip(opt.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            on_gpu = opt.param_groups[0]["params"][0].device.type == "cuda"
            with nullcontext() if on_gpu or packs(torch.bfloat16) else _InFloat32():
                opt.step()
            opt.zero_grad(set_to_none=True)
        self.taken += 1
