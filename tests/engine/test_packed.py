"""Packed layers: the same function, and rows that do not depend on one another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from outrider.engine.invariance import linears_keep_bits
from outrider.engine.packed import (
    FEWEST_ROWS,
    MAX_ROWS,
    PackedColumns,
    PackedLinear,
    fastest,
    make_ready,
    pack,
    seconds_by_rows,
)
from tests.forked import said


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rows_of_a_deep_product_do_not_depend_on_their_number() -> None:
    layer = PackedLinear(random(1024, 4096) / 64, random(1024))
    x = random(MAX_ROWS + 1, 4096, seed=1)  # one row beyond a product's limit
    whole = layer(x)
    torch.testing.assert_close(
        whole, F.linear(x, random(1024, 4096) / 64, random(1024)), rtol=1e-4, atol=1e-4
    )
    for rows in (slice(0, 1), slice(MAX_ROWS, MAX_ROWS + 1), slice(3, 5), slice(100, 117), slice(1, None)):
        assert torch.equal(layer(x[rows]), whole[rows])
    assert torch.equal(layer(x[:6].view(1, 2, 3, 4096)), whole[:6].view(1, 2, 3, 1024))
    assert linears_keep_bits(nn.Sequential(layer))


def test_a_layer_that_does_not_keep_bits_is_found() -> None:
    class Alone(PackedLinear):
        def _product(self, rows: torch.Tensor) -> torch.Tensor:
            return super()._product(rows) * (1 + rows.shape[0] % 2 * 1e-6)

    assert not linears_keep_bits(nn.Sequential(Alone(random(8, 8), None)))


def test_layers_of_one_shape_may_have_different_numbers() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16, dtype=torch.bfloat16)).requires_grad_(False)
    pack(model)
    make_ready(model, 4)
    assert linears_keep_bits(model)
    assert [layer(random(3, 16).to(layer.dtype)).dtype for layer in model] == [torch.float32, torch.bfloat16]


def test_every_kind_of_matrix_is_packed(checkpoint: Callable[..., Path]) -> None:
    for arch in ("llama", "gpt2", "mixtral"):
        model = AutoModelForCausalLM.from_pretrained(checkpoint(arch), dtype=torch.float32).eval()
        model.requires_grad_(False)
        ids = torch.arange(24)[None]
        expected = model(input_ids=ids).logits
        pack(model)
        left = [m for m in model.modules() if type(m) in (nn.Linear, Conv1D)]
        matrices = [
            name
            for name, p in model.named_parameters()
            if p.dim() > 1 and "emb" not in name and ".w" not in name
        ]
        assert not left and not matrices
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-3, atol=1e-3)


class Projections(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, width, bias=bias) for width in (48, 16, 8))


@pytest.mark.parametrize("bias", [False, True])
def test_layers_given_the_same_tensor_run_once(bias: bool) -> None:
    layers = Projections(bias).requires_grad_(False)
    x, y = random(5, 32), random(5, 32, seed=1)
    expected = {name: (layer(x), layer(y)) for name, layer in layers.named_children()}
    pack(layers)
    runs = []
    layers.q_proj.together.linear.register_forward_hook(lambda *_: runs.append(1))
    for turn in (0, 1, 0):
        for name, layer in layers.named_children():
            assert isinstance(layer, PackedColumns)
            torch.testing.assert_close(layer((x, y)[turn]), expected[name][turn], rtol=1e-5, atol=1e-5)
    assert len(runs) == 3
    assert layers.q_proj.together._output is None  # nothing is kept
    for name, layer in layers.named_children():  # and each may be given a tensor of its own
        torch.testing.assert_close(layer(x.clone()), expected[name][0], rtol=1e-5, atol=1e-5)


def test_layers_that_differ_in_what_they_take_stay_apart() -> None:
    layers = Projections(False).requires_grad_(False)
    layers.v_proj = nn.Linear(16, 8)
    pack(layers)
    assert [type(layer) for layer in layers.children()] == [PackedLinear] * 3


def test_a_layer_whose_weight_others_take_stays_as_it_is() -> None:
    layers = Projections(False).requires_grad_(False)
    expected = layers.v_proj(random(5, 32))
    pack(layers, bare={layers.v_proj})
    assert type(layers.q_proj) is type(layers.k_proj) is PackedLinear and type(layers.v_proj) is nn.Linear
    assert torch.equal(layers.v_proj(random(5, 32)), expected)


@pytest.mark.parametrize("width", [32, 384, 7008])
def test_one_row_has_the_bits_of_many(width: int) -> None:
    layer = PackedLinear(random(24, width), None)
    x = random(3, width, seed=1)
    assert torch.equal(layer(x[1]), layer(x)[1])


@pytest.mark.parametrize("fewest", [2, 3, 4])
def test_rows_that_are_filled_up_keep_their_bits(fewest: int) -> None:
    layer = PackedLinear(random(24, 384), random(24))
    x = random(6, 384, seed=1)
    whole, ran = layer(x), []
    layer.fewest, product = fewest, layer._product
    layer._product = lambda rows: ran.append(rows.numel() // 384) or product(rows)  # type: ignore[method-assign]
    for count in range(1, 7):
        assert torch.equal(layer(x[:count]), whole[:count])
    assert torch.equal(layer(x[0]), whole[0]) and torch.equal(layer(x[None, :2]), whole[None, :2])
    assert ran == [max(count, fewest) for count in (1, 2, 3, 4, 5, 6, 1, 2)]


def test_many_rows_are_rounded_up_and_keep_their_bits() -> None:
    """Each number of rows costs code of its own, which oneDNN generates and keeps."""
    layer, ran = PackedLinear(random(24, 384), random(24)), []
    x, product = random(MAX_ROWS, 384, seed=1), layer._product
    layer._product = lambda rows: ran.append(rows.numel() // 384) or product(rows)  # type: ignore[method-assign]
    whole = layer(x)
    for count in range(1, MAX_ROWS + 1):
        assert torch.equal(layer(x[:count]), whole[:count])
        assert count <= ran[-1] <= max(layer.fewest, count * 17 / 16)
    assert set(range(3, 33)) < set(ran) and len(set(ran)) <= 32 + 4 * 16


STEPS_OF_MANY_SIZES = """
import sys
from outrider.engine.engine import Work
from outrider.engine import native
from outrider.engine.loading import load_engine

native.COMPILERS = ("none",)
engine = load_engine(sys.argv[1], threads=1, kv_memory_bytes=2**24)
engine.make_ready(40)
table = engine.pool.open([])
for sizes in (range(1, 41), range(41, 100)):
    print("begin", flush=True)
    for count in sizes:
        engine.pool.extend(table, count)
        engine.step([Work(table.blocks, 0, [1] * count, count)])
        engine.pool.truncate(table, 0)
"""


def test_what_the_products_of_any_step_need_is_there_once_it_was_made_ready(
    checkpoint: Callable[..., Path],
) -> None:
    """oneDNN says itself what it has in its cache. It misses what larger steps need."""
    told = said(("-c", STEPS_OF_MANY_SIZES, str(checkpoint("llama"))), ONEDNN_VERBOSE="2")
    _, ready, larger = told.split("begin\n")
    for part, missed in ((ready, False), (larger, True)):
        products = [line for line in part.splitlines() if "inner_product" in line]
        assert any("create:cache_hit" in line for line in products)
        assert any("create:cache_miss" in line for line in products) is missed


def test_a_few_rows_run_with_as_many_as_are_fastest() -> None:
    assert fastest({1: 1.7, 2: 1.7, 3: 1.4, 4: 1.3}) == 4
    assert fastest({2: 1.0, 3: 0.97, 4: 1.3}) == 2  # not worth it
    assert fastest({1: 1.0, 2: 0.9, 3: 0.9, 4: 0.9}) == 2
    layers = [PackedLinear(random(8, 32), None) for _ in range(2)]
    assert list(seconds_by_rows(layers, (1, 2))) == [1, 2]


def test_layers_of_one_shape_run_with_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two widths: of one, a single row is slow here."""
    tried = []

    def seconds(layers: list[PackedLinear], counts: list[int]) -> dict[int, float]:
        tried.append((layers[0].in_features, counts))
        return {rows: (2.0 if rows < 3 and layers[0].in_features == 32 else 1.0) for rows in counts}

    monkeypatch.setattr("outrider.engine.packed.seconds_by_rows", seconds)
    model = nn.ModuleList([nn.Linear(32, 8), nn.Linear(16, 8), nn.Linear(32, 8)]).requires_grad_(False)
    pack(model)
    assert tried == [(32, list(FEWEST_ROWS)), (16, list(FEWEST_ROWS))]
    assert [layer.fewest for layer in model] == [3, 1, 3]
