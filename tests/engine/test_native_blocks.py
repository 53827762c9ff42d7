"""Products with weights in blocks of 32 inputs that share a scale: exact, and those of a file are kept."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Quantization

from outrider.engine.native import library
from outrider.engine.native_layers import (
    NativeBlocksInt8Linear,
    NativeInt4Linear,
    NativeLinear,
    are_nibbles,
    rounded_to_nibbles,
    rounded_to_octets,
)

needs_compiler = pytest.mark.skipif(library() is None, reason="nothing can be compiled here")
LEAST = {NativeInt4Linear: 0, NativeBlocksInt8Linear: -127}  # whole weights in blocks; and their largest
MOST = {NativeInt4Linear: 15, NativeBlocksInt8Linear: 127}
in_blocks = pytest.mark.parametrize("kind", LEAST)


def summed_by_blocks(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns products of whole numbers, whose sums of 32 are right, and added up in float32."""
    found = torch.zeros(len(x), len(weight))
    for some, others in zip(x.double().split(32, 1), weight.double().split(32, 1), strict=True):
        found += (some @ others.T).float()
    return found


@needs_compiler
@in_blocks
@pytest.mark.parametrize("shape", [(16, 32), (130, 1280), (40, 4128), (7, 70)], ids=str)
def test_weights_in_blocks_are_multiplied_exactly(kind: type[NativeLinear], shape: tuple[int, int]) -> None:
    out, width = shape
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(LEAST[kind], MOST[kind] + 1, (out, width), generator=generator)
    x = torch.randint(-32767, 32768, (70, width), generator=generator)
    weight[:, ::32], weight[:, 1::32], x[:, 1::32] = (
        LEAST[kind],
        MOST[kind],
        32767,
    )  # all are rounded to themselves
    layer = kind(weight.float(), None)
    for count in (1, 2, 3, 4, 5, 6, 7, 17, 70):
        assert torch.equal(layer(x[:count].float()), summed_by_blocks(x[:count], weight))


@needs_compiler
@in_blocks
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_of_the_largest_weights_in_blocks_do_not_overflow(kind: type[NativeLinear], sign: int) -> None:
    weight, x = torch.full((40, 2048), float(MOST[kind])), torch.full((7, 2048), 32767.0 * sign)
    weight[:, ::32] = LEAST[kind]  # so that the largest is not what stands for 0
    layer = kind(weight, None)
    for count in (1, 3, 7):
        assert torch.equal(layer(x[:count]), summed_by_blocks(x[:count], weight))


def in_floats(kind: type[NativeLinear], weight: torch.Tensor) -> torch.Tensor:
    """Returns what weights are worth once they are rounded."""
    if kind is NativeInt4Linear:
        whole, steps, least, _ = rounded_to_nibbles(weight)
        found = whole * steps.float()[..., None] + least.float()[..., None]
    else:
        whole, steps = rounded_to_octets(weight)
        found = whole * steps.float()[..., None]
    return found.view(len(weight), -1)[:, : weight.shape[1]]


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (NativeInt4Linear, Quantization.Q4_0),
        (NativeInt4Linear, Quantization.Q4_1),
        (NativeBlocksInt8Linear, Quantization.Q8_0),
    ],
)
@pytest.mark.parametrize("width", [320, 96])
def test_weights_of_a_file_in_blocks_are_rounded_to_themselves(
    kind: type[NativeLinear], own: Quantization, width: int
) -> None:
    weight = (torch.randn(50, width, generator=torch.Generator().manual_seed(1)) * 0.3 + 0.1).numpy()
    weight[3, :32], weight[4, 32:64] = 0.0, 0.7
    kept = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight, own), own))
    assert torch.equal(in_floats(kind, kept), kept) and not torch.equal(kept, torch.from_numpy(weight))
    assert are_nibbles(kept) == (kind is NativeInt4Linear) and not are_nibbles(torch.from_numpy(weight))


@pytest.mark.parametrize(("least", "most"), [(0, 15), (1, 15), (1, 14), (3, 13)])
def test_weights_of_a_file_are_kept_however_many_steps_from_0_the_farthest_is(least: int, most: int) -> None:
    generator = torch.Generator().manual_seed(1)
    whole = torch.randint(least, most + 1, (80, 10, 32), generator=generator) - 8
    own = (whole * torch.randn(80, 10, 1, generator=generator).half().float()).view(
        80, 320
    )  # as Q4_0 has them
    assert torch.equal(in_floats(NativeInt4Linear, own), own) and are_nibbles(own)


@needs_compiler
@in_blocks
@pytest.mark.parametrize("size", [1e-30, 1e-7, 1e9])
def test_weights_may_be_of_any_size(kind: type[NativeLinear], size: float) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, x = torch.randn(16, 64, generator=generator), torch.randn(3, 64, generator=generator)
    usual, found = kind(weight, None)(x), kind(weight * size, None)(x) / size
    assert (found - usual).norm() < 0.02 * usual.norm()
    assert not kind(torch.zeros(16, 64), None)(x).any()


def test_what_fills_a_block_up_makes_it_no_wider() -> None:
    weight = torch.randn(8, 40, generator=torch.Generator().manual_seed(1)) * 0.01 + 5
    assert (in_floats(NativeInt4Linear, weight) - weight).abs().max() < 0.005
