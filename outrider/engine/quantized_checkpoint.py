"""Checkpoints whose weights are quantised for GPUs: what they need here, and how they are loaded."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from typing import Any

import torch
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from outrider.engine.checkpoint import Checkpoint
from outrider.errors import StartupError

BESIDE = "hf_quant_config.json"  # where NVIDIA's modelopt tells how it quantised, often there alone
PACKAGES = {  # that transformers leaves the work to, by the quant_method of config.json
    "aqlm": ("aqlm",),
    "auto-round": ("auto-round",),
    "awq": ("gptqmodel",),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors",),
    "eetq": ("kernels",),
    "fbgemm_fp8": ("fbgemm-gpu",),
    "gptq": ("optimum", "gptqmodel"),
    "hqq": ("hqq",),
    "quanto": ("optimum-quanto",),
    "quark": ("amd-quark",),
    "spqr": ("spqr-quant",),
    "torchao": ("torchao",),
    "vptq": ("vptq",),
}
EXTRAS = frozenset({"awq", "bitsandbytes", "compressed-tensors", "gptq", "torchao"})  # of outrider


def prepare(config: Any, where: Checkpoint, device: torch.device) -> str | None:
    """Returns how the weights are quantised that a configuration describes; None if they are not.

    On a CPU the configuration is changed, so that they are loaded as plain numbers if transformers can do
    that: there are no kernels to run them as they are. Raises StartupError, naming the package, if one is
    missing."""
    told = getattr(config, "quantization_config", None)
    if told is None:
        told = getattr(config.get_text_config(), "quantization_config", None)
    if told is None and where.gguf is None and (where.folder / BESIDE).is_file():
        told = {"quant_method": f"modelopt ({BESIDE})"}
    if told is None:
        return None
    values: dict[str, Any] = told if isinstance(told, dict) else told.to_dict()
    method = str(values.get("quant_method") or ("bitsandbytes" if _bitsandbytes(values) else "unknown"))
    kind = AUTO_QUANTIZATION_CONFIG_MAPPING.get("bitsandbytes_4bit" if method == "bitsandbytes" else method)
    if kind is None:
        raise StartupError(
            f"{where} is quantised by {method}, which transformers does not know; give it in another format, "
            "such as GGUF or FP8, or as it was before"
        )
    missing = [package for package in PACKAGES.get(method, ()) if not _installed(package)]
    if missing:
        command = f"'outrider[{method}]'" if method in EXTRAS else " ".join(missing)
        raise StartupError(
            f"{where} is quantised by {method}, which needs {' and '.join(missing)}: "
            f"pip install {command}, or give it as a GGUF file, or as it was before"
        )
    if device.type == "cpu" and "dequantize" in signature(kind).parameters:
        config.quantization_config = {**values, "dequantize": True}
    return method


def _bitsandbytes(values: dict[str, Any]) -> bool:
    return bool(values.get("load_in_4bit") or values.get("load_in_8bit"))


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
