"""Which layers of models have a recurrent state, and which of this engine's stand in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from outrider.engine.gated_delta import GatedDelta, is_gated_delta
from outrider.engine.mamba2 import Mamba2, is_mamba2
from outrider.engine.recurrent_state import RecurrentLayer

KINDS: tuple[tuple[Callable[[Any], bool], Callable[[Any], RecurrentLayer]], ...] = (
    (is_gated_delta, GatedDelta),
    (is_mamba2, Mamba2),
)


def are_in(model: nn.Module) -> bool:
    """Returns whether a model has any, its own or this engine's."""
    return any(isinstance(module, RecurrentLayer) or _kind(module) for module in model.modules())


def obstacle(model: nn.Module) -> str | None:
    """Returns why its text cannot be that of its own code, as a phrase."""
    limits = [getattr(module, "time_step_limit", (0.0,)) for module in model.modules() if is_mamba2(module)]
    if any(least > 0 for least, *_ in limits):
        return (
            "its own code limits time steps from below as it reads a prompt, and not as it decodes: its text "
            "depends on the cache"
        )
    return None


def take_over(model: nn.Module) -> None:
    """Puts this engine's layers into the place of the model's own."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (kind := _kind(child)) is not None:
                setattr(parent, name, kind(child))


def _kind(module: nn.Module) -> Callable[[Any], RecurrentLayer] | None:
    return next((kind for is_one, kind in KINDS if is_one(module)), None)
