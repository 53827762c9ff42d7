"""How much a model's logits depend on rounding: its modules round what they give in another way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

SHARE = 1 / 32  # of the numbers: so two ways to attend lie about as far apart as this is from the usual


@contextmanager
def rounding_anew(model: nn.Module) -> Iterator[None]:
    """Moves some of the numbers that modules without parts give by one place of the last digit, as another
    order of sums does."""
    generators: dict[torch.device, torch.Generator] = {}

    def moved(module: nn.Module, _: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        device, place = output.device, torch.finfo(output.dtype).eps
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(3)
        drawn = torch.rand(output.shape, generator=generators[device], device=device)
        up, down = drawn < SHARE / 2, drawn > 1 - SHARE / 2
        return (output.float() * (1 + place * (up.float() - down.float()))).to(output.dtype)

    hooks = [
        module.register_forward_hook(moved)
        for module in model.modules()
        if next(module.children(), None) is None
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
