"""States carried on by native code: what torch computes, and the same bits however the tokens are divided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from outrider.engine import gated_delta, mamba2
from outrider.engine.native import library

pytestmark = pytest.mark.skipif(library() is None, reason="there is no compiler")

TOKENS, HEADS = 9, 3
Case = tuple[Any, Any, torch.Size, Any]  # module, kind of layer, shape of a state, what it is given


def some(*shape: int) -> torch.Tensor:
    return torch.rand(TOKENS, HEADS, *shape) - 0.4


def of_mamba2(rows: int, depth: int) -> Case:
    given = some(1, 1).abs(), some(rows, 1), some(1, depth), some(depth, 1), some(rows)
    return mamba2, mamba2.Mamba2, torch.Size((HEADS, rows, depth)), mamba2.Ready(*given)


def of_gated_delta(keys: int, width: int, decays: int) -> Case:
    given = some(2, keys) / 9, some(width), some(decays, 1).abs(), some(1).abs(), some(1)
    return gated_delta, gated_delta.GatedDelta, torch.Size((HEADS, keys, width)), gated_delta.Ready(*given)


@pytest.mark.parametrize(
    "make",
    [
        lambda: of_mamba2(5, 16),
        lambda: of_mamba2(64, 128),
        lambda: of_gated_delta(8, 16, 1),
        lambda: of_gated_delta(64, 80, 64),  # some columns four vectors at a time, and one more
    ],
)
def test_it_is_what_torch_computes_however_the_tokens_are_divided(
    make: Callable[[], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    module, kind, shape, given = make()
    begin = torch.rand(shape)

    def carried(*ends: int) -> tuple[torch.Tensor, torch.Tensor]:
        state, found, first = begin.clone(), list[torch.Tensor](), 0
        for end in ends:
            found += kind.advance(cast(Any, None), given, range(first, end), state)
            first = end
        return torch.stack(found), state

    whole = carried(TOKENS)
    for ends in ((4, TOKENS), (0, 1, 3, 8, TOKENS)):
        assert all(map(torch.equal, whole, carried(*ends)))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert all(map(torch.equal, whole, carried(TOKENS)))
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(module, "carries", lambda state: False)
    for ours, torchs in zip(whole, carried(TOKENS), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5)
