"""RMS norms in few operations: the same bits, and only where they are the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outrider.engine.norms import ShortNorm, shortened


def with_weight(norm: nn.Module) -> nn.Module:
    width = norm.weight.shape[0]
    norm.weight = nn.Parameter(torch.randn(width, generator=torch.Generator().manual_seed(1)))
    return norm


@pytest.mark.parametrize("width", [7, 64, 384])
def test_the_same_bits_whatever_runs_beside_a_row(width: int) -> None:
    norm = with_weight(LlamaRMSNorm(width, 1e-6))
    ours = shortened(norm)
    assert ours is not None
    x = torch.randn(1, 300, width, generator=torch.Generator().manual_seed(2)) * 4
    whole = ours(x)
    assert torch.equal(whole, norm(x))
    for rows in (slice(0, 1), slice(5, 12), slice(100, 300)):
        assert torch.equal(ours(x[:, rows]), whole[:, rows])


class Shifted(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1e-6


OTHERS = {
    "weight from one": GemmaRMSNorm(64),
    "something more": Shifted(64, 1e-6),
    "layer norm": nn.LayerNorm(64),
    "linear": nn.Linear(64, 64),
    "ours": ShortNorm(nn.Parameter(torch.ones(64)), 1e-6),
}


@pytest.mark.parametrize("module", OTHERS.values(), ids=OTHERS)
def test_others_stay(module: nn.Module) -> None:
    assert shortened(module) is None
