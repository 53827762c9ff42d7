"""The kernels of products and of what lies between them without a GPU: run by Triton's interpreter, and
compiled for GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.engine import triton_products, triton_rows
from outrider.engine.triton_products import GROUP, TILES, Tile
from tests.triton_kernels import compiled, interpreted, spilled

SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes of a multiprocessor
POINTERS = {"x": "*bf16", "bias": "*bf16", "out": "*bf16", "scales": "*fp32", "parts": "*fp32"}
ALIGNED = {*POINTERS, "weight", "outputs", "depth", "chunk", "stride", "query", "keys", "values"}


@pytest.mark.timeout(900)  # some ten seconds of a core, of which there may be a tenth
def test_products_and_the_pass_in_the_interpreter() -> None:
    interpreted(Path(__file__).with_name("interpreted_products.py"))


def kernel_of(
    kernel: Any, capability: int, constants: dict[str, Any], types: dict[str, str], **how: Any
) -> Any:
    return compiled(kernel, capability, POINTERS | types, constants, ALIGNED, enable_fp_fusion=False, **how)


def product(capability: int, tile: Tile, weight: str, gated: bool) -> Any:
    scaled = weight != "*bf16"
    constants = {
        "OUTPUTS": tile.outputs,
        "TOKENS": tile.tokens,
        "DEPTH": tile.depth,
        "PARTS": 2 if tile.whole else 1,
        "EVEN": True,
        "SCALED": scaled,
        "BIASED": False,
        "GATED": gated,
        "GROUP": GROUP,
        "PRECISION": "tf32",
        "bias": None,
        **({} if scaled else {"scales": None}),
    }
    how = {"num_stages": tile.stages, "num_warps": tile.warps}
    return kernel_of(triton_products._product, capability, constants, {"weight": weight}, **how)


@pytest.mark.parametrize(
    ("capability", "weight"),
    [(80, "*i8"), (80, "*bf16"), (90, "*i8"), (90, "*bf16"), (90, "*fp8e4nv"), (100, "*i8"), (100, "*bf16")],
)
def test_of_the_tiles_for_each_number_of_rows_one_fits(capability: int, weight: str, tmp_path: Path) -> None:
    for tiles in TILES.values():
        made = (product(capability, tile, weight, gated=tile is tiles[0]) for tile in tiles)
        fitting = (kernel for kernel in made if kernel.metadata.shared <= SHARED[capability])
        assert any(spilled(kernel.asm["ptx"], tmp_path) == 0 for kernel in fitting)


def test_on_hopper_all_tiles_multiply_by_one_kind_of_instruction() -> None:
    """Others add in another order: the bits would depend on the number of rows."""
    for tiles in TILES.values():
        for tile in tiles:
            ptx = product(90, tile, "*bf16", gated=False).asm["ptx"]
            assert "wgmma.mma_async" in ptx and "mma.sync" not in ptx


@pytest.mark.parametrize("capability", SHARED)
def test_what_lies_between_products_keeps_its_numbers_in_registers(capability: int, tmp_path: Path) -> None:
    norm = {"WIDTH": 4096, "PADDED": 4096, "PARTS": 2, "BIASED": False, "bias": None}
    types = {"x": "*bf16", "weight": "*bf16", "eps": "fp32"}
    made = [kernel_of(triton_rows._normed, capability, norm, types, num_warps=8)]
    turn = {
        "QUERIES": 32,
        "KEYS": 8,
        "WIDTH": 128,
        "PADDED": 64,
        "PARTS": 1,
        "BIASED": True,
        "NORMED": True,
        "TREES": True,
    }
    halves = dict.fromkeys(("query_norm", "key_norm", "cosines", "sines", "query", "keys", "values"), "*bf16")
    places = {"slots": "*i64", "again_ends": "*i32", "again": "*i32"}
    made.append(
        kernel_of(triton_rows._turned, capability, turn, {**halves, **places, "eps": "fp32"}, num_warps=1)
    )
    store = {"WIDTH": 128, "PADDED": 128, "VALUE_WIDTH": 96, "VALUE_PADDED": 128}
    types = {**dict.fromkeys(("key", "value", "keys", "values"), "*bf16"), **places}
    made.append(kernel_of(triton_rows._stored, capability, store, types, num_warps=1))
    summed = {"PARTS": 16, "BIASED": True, "BLOCK": 1024}
    made.append(kernel_of(triton_products._sum, capability, summed, {}))
    assert [spilled(kernel.asm["ptx"], tmp_path) for kernel in made] == [0, 0, 0, 0]
