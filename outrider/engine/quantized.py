"""Linear layers on CPU in 8 bits: for a draft model, whose numbers need not be exact.

Weights are rounded once, by output channel; activations at each call, by what the whole batch spans. So a
row's result depends on the rows beside it.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from outrider.errors import StartupError

LARGEST = 127


class Int8Linear(nn.Module):
    """x @ weight.T + bias for a weight [out, in], float32 in and out."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        weight = weight.detach().contiguous()
        scales = (weight.abs().amax(1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)  # [out]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch means to replace its quantized tensors one day
            rounded = torch.quantize_per_channel(
                weight, scales.double(), torch.zeros(len(scales), dtype=torch.int64), 0, torch.qint8
            )
            self._packed = torch.ops.quantized.linear_prepack(rounded, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # One bit less for activations: without VNNI, sums of full bytes would overflow.
        found: torch.Tensor = torch.ops.quantized.linear_dynamic(x, self._packed, True)
        return found


def quantize(model: nn.Module) -> None:
    """Puts every linear layer of an fp32 CPU model into 8 bits; embeddings, norms and experts stay.

    Raises StartupError where this torch cannot."""
    if "x86" not in torch.backends.quantized.supported_engines:
        raise StartupError("--draft-quantization int8: torch has no kernels for it here; leave it out")
    try:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    setattr(parent, name, Int8Linear(child.weight, child.bias))
                elif type(child) is Conv1D:
                    weight, bias = child._parameters["weight"], child._parameters["bias"]
                    assert weight is not None
                    setattr(parent, name, Int8Linear(weight.T, bias))
    except (RuntimeError, AttributeError):  # another torch, without these operators
        raise StartupError(
            "--draft-quantization int8: this torch cannot multiply in 8 bits on a CPU; leave it out"
        ) from None
