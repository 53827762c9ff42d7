"""Modules that call products and activations themselves: each row gets its own bits from them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from outrider.engine.placeless_calls import replacing
from outrider.engine.running_modules import RunningModules


class Subclass(nn.Linear):
    pass


class Router(nn.Module):
    """What a mixture of experts has, with few of them."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], experts: int = 7) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, 64))
        self.bias = nn.Parameter(torch.randn(experts))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(F.linear(x, self.weight, self.bias))


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(64, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.matrix


class MadeAnew(Product):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, (self.matrix * 2).T)


MODULES = {
    "sigmoid": lambda: Router(torch.sigmoid),
    "method": lambda: Router(torch.Tensor.sigmoid),
    "softplus": lambda: Router(F.softplus),
    "silu": lambda: Router(F.silu),
    "gelu": lambda: Router(F.gelu),
    "a subclass of Linear": lambda: Subclass(64, 7),
    "matmul": Product,
    "a weight made anew": MadeAnew,
}


@pytest.mark.parametrize("kind", MODULES)
def test_rows_get_the_same_numbers_and_their_own_bits(kind: str) -> None:
    torch.manual_seed(1)
    inner = MODULES[kind]()
    model, plain = nn.Sequential(inner, nn.ReLU()), inner.forward
    x = torch.randn(300, 64)
    with torch.inference_mode():
        expected = plain(x)
        with RunningModules(model) as modules, replacing(modules):
            model(x)
        found = inner(x)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        for first, count in ((0, 1), (1, 2), (7, 3), (2, 5), (30, 9), (3, 17), (100, 33)):
            assert torch.equal(inner(x[first : first + count]), found[first : first + count])
    assert "forward" not in vars(model[1])  # which calls none of these


def test_a_product_of_single_numbers_stays() -> None:
    class Angles(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :1] @ x[:1, :]

    model = Angles()
    with RunningModules(model) as modules, replacing(modules):
        model(torch.ones(3, 4))
    assert "forward" not in vars(model)
