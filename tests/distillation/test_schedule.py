"""Optimisers take the same steps where a processor has no bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distillation import schedule
from distillation.schedule import Schedule, optimisers


def stepped() -> torch.Tensor:
    """Returns by how much a step changes a matrix inside the layers."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"layers": nn.Linear(48, 32), "embedding": nn.Embedding(200, 48)})
    before = model["layers"].weight.detach().clone()
    steps = Schedule(optimisers(model, 0.02, 0.01), model, steps=10, warmup=1)
    model["layers"](model["embedding"](torch.arange(200))).square().sum().backward()
    steps.step()
    return model["layers"].weight.detach() - before


def test_a_step_is_the_same_but_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for halves in (True, False):
        monkeypatch.setattr(schedule, "packs", lambda _, halves=halves: halves)
        taken.append(stepped())
    assert 0 < float((taken[0] - taken[1]).norm()) < 0.05 * float(taken[0].norm())
