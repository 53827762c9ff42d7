"""Activations that must not depend on the place of a number in its batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from outrider.engine.activations import MOST_AT_ONCE, gelu, gelu_tanh, placeless, silu, silu_of_rows

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


@pytest.mark.parametrize("width", [96, 1536, 40, MOST_AT_ONCE + 32])
@pytest.mark.parametrize("threads", [1, 2])
def test_silu_of_rows_knows_no_company(width: int, threads: int) -> None:
    both = torch.randn(65, 2 * width, generator=torch.Generator().manual_seed(4)) * 4
    x = both[:, width:]  # as the second of two halves
    torch.set_num_threads(threads)
    try:
        whole = silu_of_rows(x)
        torch.testing.assert_close(whole, F.silu(x), rtol=1e-5, atol=1e-6)
        for rows in (slice(0, 1), slice(7, 8), slice(3, 20), slice(1, 65)):
            assert torch.equal(silu_of_rows(x[rows]), whole[rows])
            assert torch.equal(silu_of_rows(x[None, rows]), whole[None, rows])
    finally:
        torch.set_num_threads(1)
    assert torch.equal(silu_of_rows(x), whole)


@pytest.mark.parametrize("kind", [torch.nn.SiLU, torch.nn.GELU, lambda: torch.nn.GELU(approximate="tanh")])
def test_modules_are_replaced_by_what_they_compute(kind: Callable[[], torch.nn.Module]) -> None:
    module, x = kind(), torch.linspace(-6, 6, 999)
    ours = placeless(module)
    assert ours is not None
    torch.testing.assert_close(ours(x), module(x), rtol=1e-5, atol=1e-6)


def test_other_modules_stay() -> None:
    assert placeless(torch.nn.ReLU()) is None and placeless(torch.nn.Linear(2, 2)) is None
