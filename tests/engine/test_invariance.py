"""Which rows may attend in one call: found by trying, on the machine at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from outrider.engine.attention import LayerAttention
from outrider.engine.engine import Engine, Work
from outrider.engine.gathered_attention import GatheredAttention
from outrider.engine.invariance import KEY_COUNTS, attention_keeps_bits, row_batching
from outrider.engine.step_inputs import RowBatching

LAYER = LayerAttention(
    query_heads=6, key_heads=2, width=32, value_width=32, window=None, scale=0.2, softcap=None
)
LAYERS = [LAYER, replace(LAYER, window=4096)]

attend_rightly = F.scaled_dot_product_attention


def attending(monkeypatch: pytest.MonkeyPatch, change: Callable[[int, int], float]) -> None:
    """Lets torch's attention add `change` of its numbers of rows and of keys to what it gives."""

    def attend(query: Tensor, key: Tensor, *values: Tensor, **options: Any) -> Tensor:
        return attend_rightly(query, key, *values, **options) + change(query.shape[2], key.shape[2])

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)


def only(batching: RowBatching) -> Callable[[int, int], float]:
    """Another result for what this batching would not do."""
    keys = {count % 512 for count in batching.keys}
    return lambda rows, count: 0.0 if rows % batching.rows == 0 and count % 512 in keys else 0.01


@pytest.mark.parametrize("rows", [4, 8, 16])
def test_rows_and_keys_are_filled_up_to_what_gives_the_same_bits(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = row_batching(LAYERS)
    if here is None or here.rows > rows:
        pytest.skip("torch's kernels on this machine want more rows, or each alone")
    fewer = tuple(count for count in here.keys if count != 128)
    # A kernel that keeps the bits of few sizes anyway can spare none: below half of them each row is alone.
    wanted = RowBatching(rows, fewer if 2 * len(fewer) > len(KEY_COUNTS) else here.keys)
    attending(monkeypatch, only(wanted))
    assert row_batching(LAYERS) == wanted
    assert attention_keeps_bits(LAYERS, wanted)
    assert not attention_keeps_bits(LAYERS, RowBatching(rows, KEY_COUNTS))


def test_where_that_would_be_few_sizes_each_row_attends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    attending(monkeypatch, only(RowBatching(4, (256, 512))))
    assert row_batching(LAYERS) is None


def test_what_torchs_kernel_cannot_do_attends_row_by_row() -> None:
    assert row_batching([LAYER, replace(LAYER, softcap=30.0)]) is None
    assert row_batching([replace(LAYER, value_width=16)]) is None


def test_rows_give_the_same_numbers_together_as_alone(engine: Callable[..., Engine]) -> None:
    found = []
    for batching in (None, RowBatching(4, KEY_COUNTS)):
        subject = engine("llama")
        assert isinstance(subject.attention, GatheredAttention)
        subject.attention.row_batching = batching
        works = [
            Work(list(range(10 * i, 10 * i + 10)), 0, [(7 * i + j) % 198 + 1 for j in range(count)], 3)
            for i, count in enumerate([150, 3, 9, 3, 70])
        ]
        found.append(subject.step(works))
    assert found[0].shape == found[1].shape
    assert (found[0] - found[1]).abs().max() < 1e-4 * found[0].abs().max()
