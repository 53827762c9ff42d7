"""Which module runs, which one failed, and which gives a token other bits in other company."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outrider.engine.running_modules import RowPrints, RunningModules


class Uneven(nn.Module):
    """Gives other bits in steps of an odd number of tokens."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x * (1 + 1e-6 * (x.shape[1] % 2)), None


class Whole(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.ReLU(), inner, nn.Flatten(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(self.first(x))[0]
        return self.head(found)


def test_the_first_module_with_other_bits_is_named() -> None:
    x, model = torch.rand(1, 8, 4), Whole(Uneven())
    with RunningModules(model) as modules:
        prints = RowPrints(modules, 8, model.head)
        with prints.comparing(8, [(torch.arange(8), 0)]):
            model(x)
        with prints.comparing(4, [(torch.tensor([3, 1]), 5)]):
            model(x[:, [0, 6, 1, 5]])
        assert prints.differing is None
        with prints.comparing(3, [(torch.tensor([1, 2]), 4)]):
            model(x[:, [0, 4, 5]])
    assert prints.differing == "inner (Uneven) gives 2 of 3 tokens other bits than 8"


def test_a_failure_leaves_the_module_that_failed() -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AttributeError("no weight")

    model = Whole(Failing())
    with RunningModules(model) as modules:
        with pytest.raises(AttributeError):
            model(torch.zeros(1))
        assert modules.named(modules.running) == "inner (Failing)"
    assert not model.first._forward_hooks
