"""A LoRA adapter as peft saves it (Hu et al., arXiv 2106.09685), merged into a model: W becomes W + s B A.

What of an adapter cannot be merged is refused by name: the text would be another without it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from outrider.engine.other_formats import ADAPTER as CONFIG
from outrider.engine.other_formats import damaged
from outrider.errors import StartupError

WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
PREFIX = "base_model.model."
KEPT = ".base_layer."  # in the name of a weight beside which a layer has its two small matrices
DOWN, UP = (".lora_A.weight", ".lora_embedding_A"), (".lora_B.weight", ".lora_embedding_B")
# Settings of another arithmetic than W + s B A, by their names in CONFIG.
OTHER = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
# Beginnings that leave W as it was. Others (PiSSA, OLoRA, CorDA, LoftQ) take something from it first, and the
# adapter is for the rest.
BEGINNINGS = (None, True, False, "gaussian", "orthogonal", "eva")


def find_adapter(folder: str) -> Path:
    """Returns the folder of an adapter. Raises StartupError if it holds none that can be merged."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise StartupError(f"--lora {folder}: there is no such folder; give one that holds an adapter")
    if (path / PICKLE).is_file() and not (path / WEIGHTS).is_file():
        raise StartupError(
            f"--lora {folder} holds its weights as a pickle ({PICKLE}), which is not read: load it with peft "
            "and save it, as safetensors"
        )
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
    if (beginning := config.get("init_lora_weights")) not in BEGINNINGS:
        raise StartupError(
            f"--lora {folder} cannot be merged: by init_lora_weights in {CONFIG} it began as {beginning}, "
            "and is for what that left of the weights; convert it to plain LoRA with peft"
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
        raise StartupError(damaged(adapter / WEIGHTS, error)) from None
    downs, ups = _of_layers(tensors, DOWN), _of_layers(tensors, UP)  # [r, in], [out, r]
    for name, tensor in tensors.items():
        if not name.endswith((*DOWN, *UP)):
            _replace(model, adapter, _place(name), tensor)
    for layer in downs | ups:
        _add(model, adapter, _place(layer), downs.get(layer), ups.get(layer), config)


def _of_layers(tensors: Mapping[str, torch.Tensor], ends: Sequence[str]) -> dict[str, torch.Tensor]:
    """Returns the tensors whose names have such an end, by what is before it."""
    return {
        name.removesuffix(end): one for name, one in tensors.items() for end in ends if name.endswith(end)
    }


def _add(
    model: nn.Module,
    adapter: Path,
    name: str,
    down: torch.Tensor | None,
    up: torch.Tensor | None,
    config: Mapping[str, Any],
) -> None:
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        raise _foreign(model, adapter, name) from None
    weight: Any = getattr(layer, "weight", None)
    turned = isinstance(layer, (nn.Embedding, Conv1D))  # its weight is [in, out]
    if not (turned or type(layer) is nn.Linear) or not weight.is_floating_point():
        raise StartupError(f"{adapter} cannot be merged: {name} of the model is a {type(layer).__name__}")
    if down is None or up is None or down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1]:
        raise StartupError(f"{adapter / WEIGHTS} is damaged: the two parts for {name} do not fit together")
    added = up.float() @ down.float() * _scale(name, down.shape[0], config)  # [out, in]
    if turned:
        added = added.T
    if added.shape != weight.shape:
        raise StartupError(
            f"{adapter} is for another model: "
            f"{name} is {list(weight.shape)} here, and {list(added.shape)} there"
        )
    _check_untied(model, adapter, f"{name}.weight", weight)
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
    tensor = tensor.to(found.device, found.dtype)
    if torch.equal(found, tensor):  # peft saves some that it has not changed
        return
    _check_untied(model, adapter, name, found)
    with torch.no_grad():
        found.copy_(tensor)


def _check_untied(model: nn.Module, adapter: Path, name: str, weight: torch.Tensor) -> None:
    """Raises StartupError for a weight that is that of two layers, of which an adapter changes one."""
    owners = sum(weight is one for module in model.modules() for one in module._parameters.values())
    if owners > 1:
        raise StartupError(f"{adapter} cannot be merged: {name} of the model is tied to another layer's")


def _scale(name: str, rank: int, config: Mapping[str, Any]) -> float:
    alphas = config.get("alpha_pattern") or {}
    pattern = next((key for key in alphas if re.match(rf"(.*\.)?({key})$", name)), None)
    alpha = float(alphas[pattern] if pattern is not None else config.get("lora_alpha", 8))
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _place(name: str) -> str:
    return name.removeprefix(PREFIX).replace(KEPT, ".")


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
