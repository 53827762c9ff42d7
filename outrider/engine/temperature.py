"""The temperature of a layer's scores that grows with the position (Nakanishi, arXiv 2501.19399).

Llama 4's own code counts a token's position from the beginning of what is run at a time. Here that is a
step, of many sessions, so this engine takes it over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_TAKEN = "_outrider_temperature"


@dataclass(frozen=True, slots=True)
class Temperature:
    layer: Any  # has the numbers that it depends on

    def factors(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns what queries at these positions are multiplied by."""
        steps = torch.floor((positions.float() + 1.0) / self.layer.floor_scale)
        factors: torch.Tensor = torch.log1p(steps) * self.layer.attn_scale + 1.0
        return factors


def take_over(model: nn.Module) -> None:
    """From now on the model's own code leaves this out, and `at_positions` does it."""
    for layer in model.modules():
        if getattr(layer, "attn_temperature_tuning", False) and hasattr(layer, "floor_scale"):
            layer.attn_temperature_tuning = False  # type: ignore[assignment]
            if not getattr(layer, "use_rope", False):
                setattr(layer, _TAKEN, Temperature(layer))


def at_positions(
    layer: nn.Module,
    query: torch.Tensor,  # [1, H, T, D]
    positions: torch.Tensor,  # [1, T]
) -> torch.Tensor:
    """Returns the layer's queries at these positions."""
    taken: Temperature | None = getattr(layer, _TAKEN, None)
    if taken is None:
        return query
    return (query * taken.factors(positions)[:, None, :, None]).to(query.dtype)
