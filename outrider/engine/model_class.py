"""As which of transformers' classes a checkpoint is loaded, and which part of the model reads text."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from outrider.engine.running_modules import RunningModules

TOKENS = 8  # of the pass that shows what reads text


def auto_class(config: Any) -> Any:
    """Returns what loads a model of this configuration; None if it is no causal language model.

    A multimodal model is one, by its text part."""
    if config.is_encoder_decoder:
        return None
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    has_text_part = config.get_text_config() is not config
    return (
        AutoModelForMultimodalLM
        if has_text_part and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING
        else None
    )


def leave_text_part(model: Any) -> None:
    """Takes from a multimodal model what reads images or sounds: the parts beside its language model that do
    not run when it reads text. Their memory is freed."""
    if model.config.get_text_config() is model.config:
        return
    ids = torch.arange(1, TOKENS + 1, device=next(model.parameters()).device)[None]
    with RunningModules(model) as modules, torch.inference_mode():
        try:
            model(input_ids=ids, use_cache=False)
        except Exception:  # the check that follows tells what is wrong with it
            return
    kept = set(modules.ran)
    for parent in _above(model, model.get_decoder()):
        for name, child in list(parent.named_children()):
            if not kept & set(child.modules()):
                setattr(parent, name, None)


def _above(model: nn.Module, part: nn.Module) -> list[nn.Module]:
    """Returns the modules that hold a part of a model, and the model."""
    return [module for module in model.modules() if module is not part and part in set(module.modules())]
