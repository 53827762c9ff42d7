"""The attention kernel without a GPU: run by Triton's interpreter, and compiled for GPUs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from outrider.engine import triton_attention
from tests.triton_kernels import compiled, interpreted, spilled, triton

TYPES = {
    **dict.fromkeys(("sums_room", "bests_room", "totals_room"), "*fp32"),
    **dict.fromkeys(("arrivals", "query_ends", "keys_used", "tables"), "*i32"),
    "scale": "fp32",
    "cap": "fp32",
}
NUMBERS = ("query", "keys", "values", "out", "sinks")
NOT_ALIGNED = {"scale", "cap", "sessions", "pages", "window", "stretch", "most_parts", "shares"}
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@pytest.mark.timeout(900)  # some twenty seconds of a core, of which there may be a tenth
def test_it_computes_attention_in_tritons_interpreter() -> None:
    interpreted(Path(__file__).with_name("interpreted_attention.py"))


def attention(capability: int, dtype: str, shared: int, width: int, rows: int, **more: bool) -> Any:
    kernel = triton_attention._attend
    constants: dict[str, Any] = {
        "BLOCK": triton_attention.BLOCK_SIZE,
        "PIECE": triton_attention.PIECE,
        "SESSIONS": 64,
        "HEADS": 8,
        "SHARED": shared,
        "ROWS": rows,
        "WIDTH": width,
        "PADDED": triton.next_power_of_2(width),
        "VALUE_WIDTH": width,
        "VALUE_PADDED": triton.next_power_of_2(width),
        "CAPPED": False,
        "STRETCHED": False,
        "SINKS": False,
        "LOG2": triton_attention.LOG2_E,
        **more,
    }
    types = TYPES | dict.fromkeys(NUMBERS, f"*{dtype}")
    aligned = {parameter.name for parameter in kernel.params} - NOT_ALIGNED
    effort = triton_attention._effort(width * BYTES[dtype], rows)
    return compiled(kernel, capability, types, constants, aligned, **effort)


@pytest.mark.parametrize(
    ("capability", "dtype", "shared", "width", "rows", "more"),
    [
        (80, "fp16", 8, 256, 16, {"CAPPED": True, "STRETCHED": True}),
        (80, "bf16", 4, 128, 16, {}),
        (90, "bf16", 4, 128, 16, {}),
        (100, "bf16", 4, 128, 16, {}),
        (90, "bf16", 4, 128, 32, {}),
        (90, "fp16", 4, 128, 16, {}),
        (90, "fp32", 1, 64, 16, {}),
        (100, "bf16", 7, 80, 32, {"SINKS": True}),
    ],
)
def test_it_compiles_for_a_gpu_within_what_one_has(
    capability: int, dtype: str, shared: int, width: int, rows: int, more: dict[str, bool], tmp_path: Path
) -> None:
    kernel = attention(capability, dtype, shared, width, rows, **more)
    ptx = kernel.asm["ptx"]
    assert kernel.metadata.shared <= 80 * 1024, "two and more of its programs fit on a multiprocessor"
    assert spilled(ptx, tmp_path) <= 64
    if dtype != "fp32":
        layouts = set(re.findall(r"nvidia_mma<\{.*?\}>", kernel.asm["ttgir"]))
        assert len(layouts) == 1 and "warpsPerCTA = [1, 4]" in str(layouts), "for the bits, with any rows"
        assert "fma.rn.f32" not in ptx, "a contracted operation gives other bits than the two"
    if width <= 128:
        assert re.search(r"cp\.async\.wait_group\s+2;", ptx), "keys are on their way while others are summed"
