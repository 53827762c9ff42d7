"""Activations that must not depend on the place of a number in its batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from outrider.engine.activations import gelu, gelu_tanh, placeless, silu

Function = Callable[[torch.Tensor], torch.Tensor]


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


@pytest.mark.parametrize(
    ("ours", "plain"),
    [(silu, F.silu), (gelu, F.gelu), (gelu_tanh, tanh_gelu)],
    ids=["silu", "gelu", "gelu_tanh"],
)
def test_same_function_and_no_place(ours: Function, plain: Function) -> None:
    x = torch.cat(
        [torch.randn(2500, generator=torch.Generator().manual_seed(4)) * 4, torch.tensor([-200.0, 90.0, 0.0])]
    )
    whole = ours(x)
    torch.testing.assert_close(whole, plain(x), rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.cat([ours(x[i : i + 1].clone()) for i in range(len(x))]), whole)
    for first in (1, 7, 16, 33):
        assert torch.equal(ours(x[first:].clone()), whole[first:])


@pytest.mark.parametrize("kind", [torch.nn.SiLU, torch.nn.GELU, lambda: torch.nn.GELU(approximate="tanh")])
def test_modules_are_replaced_by_what_they_compute(kind: Callable[[], torch.nn.Module]) -> None:
    module, x = kind(), torch.linspace(-6, 6, 999)
    ours = placeless(module)
    assert ours is not None
    torch.testing.assert_close(ours(x), module(x), rtol=1e-5, atol=1e-6)


def test_other_modules_stay() -> None:
    assert placeless(torch.nn.ReLU()) is None and placeless(torch.nn.Linear(2, 2)) is None
