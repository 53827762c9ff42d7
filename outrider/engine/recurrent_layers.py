"""Which layers of models have a recurrent state, and which of this engine's stand in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from outrider.engine.decaying import Decaying, is_decaying
from outrider.engine.gated_delta import GatedDelta, is_gated_delta
from outrider.engine.mamba import Mamba, is_mamba
from outrider.engine.mamba2 import Mamba2, is_mamba2
from outrider.engine.recurrent_state import RecurrentLayer
from outrider.engine.rg_lru import RgLru, is_rg_lru
from outrider.engine.rwkv import TimeMix, is_time_mix, shift_by_pool

KINDS: tuple[tuple[Callable[[Any], bool], Callable[[Any], RecurrentLayer]], ...] = (
    (is_gated_delta, GatedDelta),
    (is_mamba2, Mamba2),
    (is_mamba, Mamba),
    (is_decaying, Decaying),
    (is_time_mix, TimeMix),
    (is_rg_lru, RgLru),
)
NO_LIMIT = (0.0, float("inf"))


def are_in(model: nn.Module) -> bool:
    """Returns whether a model has any, its own or this engine's."""
    return any(isinstance(module, RecurrentLayer) or _kind(module) for module in model.modules())


def names(model: nn.Module) -> list[str]:
    """Returns those of a model that are still its own."""
    return [name for name, module in model.named_modules() if _kind(module)]


def as_published(model: Any) -> None:
    """Lets a model's own code limit time steps as its checkpoint says.

    transformers limits those of Nemotron-H by what they were first set to, and only as it reads a prompt. As
    published they have no limit: https://github.com/huggingface/transformers/pull/48989"""
    published = getattr(model.config.get_text_config(), "time_step_limit", None)
    for layer in filter(is_mamba2, model.modules()):
        layer.time_step_limit = tuple(published or layer.time_step_limit or NO_LIMIT)


def obstacle(model: nn.Module) -> str | None:
    """Returns why its text cannot be that of its own code, as a phrase."""
    if any(module.time_step_limit != NO_LIMIT for module in filter(is_mamba2, model.modules())):
        return (
            "its own code limits time steps as it reads a prompt, and not as it decodes: its text depends on "
            "the cache"
        )
    return None


def take_over(model: nn.Module) -> None:
    """Puts this engine's layers into the place of the model's own."""
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if (kind := _kind(child)) is not None:
                if not hasattr(child, "layer_idx"):  # by its place among the layers
                    child.layer_idx = next(int(part) for part in path.split(".") if part.isdecimal())
                setattr(parent, name, kind(child))
    shift_by_pool(model)


def _kind(module: nn.Module) -> Callable[[Any], RecurrentLayer] | None:
    return next((kind for is_one, kind in KINDS if is_one(module)), None)
