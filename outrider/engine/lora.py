"""A LoRA adapter as peft saves it (Hu et al., arXiv 2106.09685), merged into a model: W becomes W + s B A.

What of an adapter cannot be merged is refused by name: the text would be another without it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from outrider.errors import StartupError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
# Settings of another arithmetic than W + s B A, by their names in CONFIG.
OTHER = (
    "use_dora",
    "lora_bias",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
)


def find_adapter(folder: str) -> Path:
    """Returns the folder of an adapter. Raises StartupError if it holds none that can be merged."""
    path = Path(folder).expanduser()
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            raise StartupError(f"--lora {folder} is no folder of a LoRA adapter: {name} is missing")
    config = _config(path)
    if config.get("peft_type") != "LORA":
        raise StartupError(f"--lora {folder} holds an adapter of type {config.get('peft_type')}, not LORA")
    if other := [name for name in OTHER if config.get(name)]:
        raise StartupError(
            f"--lora {folder} cannot be merged: it has {other[0]} in {CONFIG}; merge it with peft"
        )
    return path


def adapter_files(adapter: Path) -> list[Path]:
    return [adapter / CONFIG, adapter / WEIGHTS]


def fingerprint_with(adapter: Path, fingerprint: str) -> str:
    """Returns the digest of a model that the adapter is merged into."""
    digest = hashlib.sha256(fingerprint.encode())
    for file in adapter_files(adapter):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def merge(model: nn.Module, adapter: Path) -> None:
    """Changes the model's weights. Raises StartupError for what has no place in the model."""
    config = _config(adapter)
    try:
        tensors = load_file(adapter / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise StartupError(f"{adapter / WEIGHTS} is damaged or cut short ({error}); fetch it again") from None
    left = dict(tensors)
    for name in tensors:
        if name.endswith(".lora_A.weight"):
            down = left.pop(name)  # [r, in]
            up = left.pop(name.replace(".lora_A.", ".lora_B."), None)  # [out, r]
            _add(model, adapter, _place(name.removesuffix(".lora_A.weight")), down, up, config)
    for name, tensor in left.items():
        _replace(model, adapter, _place(name), tensor)


def _add(
    model: nn.Module,
    adapter: Path,
    name: str,
    down: torch.Tensor,
    up: torch.Tensor | None,
    config: Mapping[str, Any],
) -> None:
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        raise _foreign(model, adapter, name) from None
    weight: Any = getattr(layer, "weight", None)
    if type(layer) not in (nn.Linear, Conv1D) or not weight.is_floating_point():
        raise StartupError(f"{adapter} cannot be merged: {name} of the model is a {type(layer).__name__}")
    if up is None or down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1]:
        raise StartupError(f"{adapter / WEIGHTS} is damaged: the two parts for {name} do not fit together")
    added = up.float() @ down.float() * _scale(name, down.shape[0], config)  # [out, in]
    if type(layer) is Conv1D:
        added = added.T
    if added.shape != weight.shape:
        raise StartupError(
            f"{adapter} is for another model: "
            f"{name} is {list(weight.shape)} here, and {list(added.shape)} there"
        )
    with torch.no_grad():
        weight.copy_(weight.float() + added.to(weight.device))


def _replace(model: nn.Module, adapter: Path, name: str, tensor: torch.Tensor) -> None:
    """Puts a tensor that was saved whole into the place of the model's."""
    try:
        found = model.get_parameter(name)
    except AttributeError:
        raise _foreign(model, adapter, name) from None
    if found.shape != tensor.shape or not found.is_floating_point():
        raise StartupError(
            f"{adapter} is for another model: "
            f"{name} is {list(found.shape)} here, and {list(tensor.shape)} there"
        )
    owners = sum(found is one for module in model.modules() for one in module._parameters.values())
    if owners > 1:
        raise StartupError(f"{adapter} cannot be merged: {name} of the model is tied to another layer's")
    with torch.no_grad():
        found.copy_(tensor)


def _scale(name: str, rank: int, config: Mapping[str, Any]) -> float:
    alphas = config.get("alpha_pattern") or {}
    pattern = next((key for key in alphas if re.match(rf"(.*\.)?({key})$", name)), None)
    alpha = float(alphas[pattern] if pattern is not None else config.get("lora_alpha", 8))
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _place(name: str) -> str:
    return name.removeprefix(PREFIX)


def _foreign(model: nn.Module, adapter: Path, name: str) -> StartupError:
    return StartupError(f"{adapter} is for another model: {type(model).__name__} here has no {name}")


def _config(adapter: Path) -> dict[str, Any]:
    try:
        found = json.loads((adapter / CONFIG).read_bytes())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise StartupError(f"{adapter / CONFIG} is damaged: it holds no JSON object")
    return found
