"""Products, and the usual decoder's pass, in Triton's interpreter, which has to be asked for before anything
imports Triton: test_triton_products.py runs this file in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from outrider.engine import triton_layers
from outrider.engine.attention import NAME, run_model
from outrider.engine.flat_inputs import Shape, flatten, on_device
from outrider.engine.gathered_attention import GatheredAttention
from outrider.engine.paged_attention import PagedAttention
from outrider.engine.reference_attention import KERNEL
from outrider.engine.step_inputs import Work
from outrider.engine.triton_layers import TritonFp8Linear, TritonInt8Linear, TritonLinear
from outrider.engine.triton_pass import run_by_kernels
from outrider.engine.triton_products import SHORTEST, TILES, Tile, chunk_of, parts_of, splits_of, whole
from outrider.engine.triton_rows import normed, turned
from outrider.engine.triton_rows import stored as put
from tests.tiny_models import build

torch.set_num_threads(1)
TILED = [tiles[0] for tiles in TILES.values()] + [Tile(64, 64, 64, 4, 4, whole=True)]


@pytest.mark.parametrize(
    ("outputs", "depth", "dtype"),
    [(192, 256, torch.float32), (70, 2048, torch.float16), (130, 100, torch.float32)],
)
def test_every_tile_gives_the_product(outputs: int, depth: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    assert splits_of(outputs, depth) == max(1, depth // SHORTEST)
    weight, bias = (torch.randn(outputs, depth) * depth**-0.5).to(dtype), torch.randn(outputs).to(dtype)
    for tokens in (1, 33):
        x = torch.randn(tokens, depth).to(dtype)
        expected = x.double() @ weight.double().T + bias.double()
        for tile in TILED:
            parts = parts_of(x, weight, None, bias, tile)
            summed = len(parts) == 1
            assert summed == (tile.whole or splits_of(outputs, depth) == 1)
            found = whole(parts, None if summed else bias, dtype)
            assert float((found - expected).abs().max()) < (1e-5 if dtype == torch.float32 else 4e-3)


def test_a_depth_is_cut_by_the_weights_shape_alone_and_in_whole_steps_of_every_tile() -> None:
    assert [splits_of(*shape) for shape in ((28672, 4096), (4096, 14336), (4096, 4096), (64, 512))] == [
        1,
        2,
        2,
        1,
    ]
    for outputs, depth in ((64, 4096), (1024, 5000), (4096, 14336)):
        splits = splits_of(outputs, depth)
        assert splits > 1
        assert all(chunk_of(depth, splits) % tile.depth == 0 for tiles in TILES.values() for tile in tiles)
        assert (splits - 1) * chunk_of(depth, splits) < depth <= splits * chunk_of(depth, splits)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.float16, 2e-2)])
def test_gate_and_others_meet_in_one_product(dtype: torch.dtype, near: float) -> None:
    torch.manual_seed(2)
    weight, bias = (torch.randn(2 * 72, 96) * 0.1).to(dtype), torch.randn(144).to(dtype)
    layer = TritonLinear(weight, bias, (72, 72))
    x = torch.randn(5, 96).to(dtype)
    before = layer.forward(x)
    layer.take_turns()
    # The interpreter's sums are those of the processor's BLAS, which depend on a product's shape.
    rounding = max(1e-5, torch.finfo(dtype).eps)
    assert torch.allclose(layer.forward(x), before, rtol=rounding, atol=1e-6)
    gate, up = before.float().chunk(2, -1)
    found = layer.gated(x)
    assert found.dtype == dtype and torch.allclose(found.float(), F.silu(gate) * up, atol=near)


def test_weights_of_8_bits_are_off_by_half_a_step_at_most() -> None:
    torch.manual_seed(3)
    weight, x = torch.randn(64, 128), torch.randn(3, 128)
    found = TritonInt8Linear(weight, None).forward(x)
    steps = weight.abs().amax(1) / 127
    assert torch.all((found - x @ weight.T).abs() <= 0.5 * steps * x.abs().sum(1, keepdim=True) + 1e-4)
    assert not torch.allclose(found, x @ weight.T, atol=1e-4)


def test_weights_of_8_bits_in_floating_point_are_off_by_half_of_their_last_bit() -> None:
    torch.manual_seed(3)
    weight, x = torch.randn(64, 128), torch.randn(3, 128)
    layer = TritonFp8Linear(weight, None)
    assert layer.packed.dtype == torch.float8_e4m3fn and layer.scales is not None
    rounded = layer.packed.float() * layer.scales[:, None]
    # Three bits behind the point, and numbers below the smallest of them a step of that.
    assert torch.all((rounded - weight).abs() <= weight.abs() / 16 + layer.scales[:, None] * 2**-10)
    assert torch.allclose(layer.forward(x), x @ rounded.T, atol=1e-4)


@pytest.mark.parametrize(
    ("splits", "dtype", "near"),
    [(1, torch.float32, 1e-5), (3, torch.float32, 1e-5), (3, torch.float16, 1e-2)],
)
def test_a_norm_adds_what_comes_before(splits: int, dtype: torch.dtype, near: float) -> None:
    torch.manual_seed(4)
    x, parts = torch.randn(5, 96).to(dtype), torch.randn(splits, 5, 96)
    weight, bias = torch.randn(96).to(dtype), torch.randn(96).to(dtype)
    summed = x + parts.sum(0) + bias
    found = normed(x, parts, bias, weight, 1e-5)
    assert found.dtype == x.dtype == dtype
    assert torch.allclose(x.float(), summed, atol=near)
    assert torch.allclose(found.float(), F.rms_norm(summed, (96,), weight.float(), 1e-5), atol=near)
    assert torch.equal(normed(x, None, None, weight, 1e-5), found)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.float16, 1e-2)])
def test_queries_and_keys_are_turned_and_put_in_their_places(dtype: torch.dtype, near: float) -> None:
    torch.manual_seed(5)
    tokens, queries, keys, width = 5, 4, 2, 24
    parts, bias = (
        torch.randn(2, tokens, (queries + 2 * keys) * width),
        torch.randn((queries + 2 * keys) * width),
    )
    cosines, sines = torch.randn(2, tokens, width)
    pools = torch.zeros(2, 6, 16, keys, width, dtype=dtype).unbind()
    slots = torch.tensor([3, 40, 7, 8, 90])
    again = (
        torch.tensor([0, 0, 2, 2, 3, 3], dtype=torch.int32),
        torch.tensor([11, 12, 60, 7], dtype=torch.int32),
    )
    query = turned(parts, bias, None, 0.0, (cosines, sines), slots, again, pools, (queries, keys), dtype)
    heads = (parts.sum(0) + bias).view(tokens, -1, width)
    half = torch.cat((-heads[..., width // 2 :], heads[..., : width // 2]), -1)
    expected = heads * cosines[:, None] + half * sines[:, None]
    assert query.dtype == dtype and torch.allclose(query.float(), expected[:, :queries], atol=near)
    stored = [pool.view(-1, keys, width) for pool in pools]
    assert torch.allclose(stored[0][slots].float(), expected[:, queries : queries + keys], atol=near)
    assert torch.allclose(stored[1][slots].float(), heads[:, queries + keys :], atol=near)
    for pool in stored:
        assert torch.equal(pool[[11, 12, 60]], pool[[40, 40, 8]]), "those that go to more than one place"
    written = sum(int(pool.any(-1).sum()) for pool in stored)
    assert written == 2 * (tokens + 3) * keys, "nothing else is written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_keys_and_values_of_unequal_width_are_put_in_their_places(dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    key, value = torch.randn(2, 3, 24).to(dtype), torch.randn(2, 3, 40).to(dtype)
    pools = torch.zeros(4, 16, 2, 24, dtype=dtype), torch.zeros(4, 16, 2, 40, dtype=dtype)
    shape = Shape(3, 1, 3)
    step = flatten(
        [Work([2], 5, [1, 2, 3], 0)], shape, block_size=16, scratch_block=3, again=[(1, 7), (1, 50), (2, 0)]
    )
    put(key, value, *pools, on_device(step, key.device))
    for pool, told in zip(pools, (key, value), strict=True):
        places = pool.flatten(0, 1)
        for slot, token in ((37, 0), (38, 1), (39, 2), (7, 1), (50, 1), (0, 2)):
            assert torch.equal(places[slot], told[:, token])
        assert int(places.any(-1).sum()) == 6 * 2, "nothing else is written"


def logits(model: Any, attention: Any) -> list[torch.Tensor]:
    """Returns those of a session, in steps of different lengths."""
    found = []
    for start, count in ((0, 25), (25, 1), (26, 3)):
        tokens = [(7 * place) % 199 for place in range(start, start + count)]
        prepared = attention.prepare([Work(range(8), start, tokens, count)])
        found.append(run_model(model, attention, attention.on_device(prepared)).clone())
    return found


def alike(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor], near: float) -> bool:
    return all(torch.allclose(a, b, atol=near) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize(
    ("arch", "more", "dtype", "near"),
    [
        ("qwen3", {"attention_bias": True}, torch.float32, 1e-3),
        ("mistral", {}, torch.float32, 1e-3),
        ("mistral", {}, torch.float16, 3e-2),  # of logits up to 6
    ],
)
def test_usual_decoders_compute_what_their_own_code_does(
    arch: str, more: dict[str, bool], dtype: torch.dtype, near: float, tmp_path: Path
) -> None:
    """With norms and biases of what attends, and with windows."""
    model = AutoModelForCausalLM.from_pretrained(
        build(arch, tmp_path, num_hidden_layers=2, **more), dtype=dtype
    ).eval()
    biases = [tensor for name, tensor in model.named_parameters() if name.endswith("bias")]
    assert bool(biases) is bool(more)
    for bias in biases:  # which are zero in a fresh model
        torch.nn.init.normal_(bias)
    model.set_attn_implementation(NAME)
    with torch.inference_mode():
        expected = logits(model, GatheredAttention.on(model, 16))
        triton_layers.put_into(model, TritonLinear)
        assert alike(logits(model, GatheredAttention.on(model, 16)), expected, near)
        assert run_by_kernels(model)
        for attention in (GatheredAttention.on(model, 16), PagedAttention.on(model, 16, KERNEL)):
            assert alike(logits(model, attention), expected, near)
            windows = {how.window for how in attention.layers.values()}
            assert windows == ({24} if arch == "mistral" else {None})


def test_others_keep_their_own_code(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(build("granite", tmp_path), dtype=torch.float32).eval()
    triton_layers.put_into(model, TritonLinear)
    assert not run_by_kernels(model)
