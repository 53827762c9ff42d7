"""The attention kernel without a GPU: run by Triton's interpreter, and compiled for GPUs."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is for Linux on x86-64")

from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from outrider.engine import triton_attention  # noqa: E402

NUMBERS = {"scale": "fp32", "cap": "fp32"}
INTEGERS = {"sessions", "pages", "window", "stretch", "most_parts", "shares"}
KEPT = {"sums_room", "bests_room", "totals_room"}
LISTS = {"arrivals", "query_ends", "keys_used", "tables"}
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@pytest.mark.timeout(900)  # some twenty seconds of a core, of which there may be a tenth
def test_it_computes_attention_in_tritons_interpreter() -> None:
    """The interpreter has to be asked for before anything imports Triton."""
    interpreted("interpreted_attention.py")


def interpreted(file: str) -> None:
    """Runs the tests of a file beside this one in a process of their own."""
    tried = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file],
        cwd=Path(__file__).parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert tried.returncode == 0, tried.stdout[-4000:]
    assert " passed" in tried.stdout


def compiled(capability: int, dtype: str, shared: int, width: int, rows: int, **more: bool) -> Any:
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
    signature, aligned = {}, {}
    for place, name in enumerate(inspect.signature(kernel.fn).parameters):
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name in KEPT | LISTS:
            signature[name] = "*fp32" if name in KEPT else "*i32"
        elif name in ("query", "keys", "values", "out", "sinks"):
            signature[name] = f"*{dtype}"
        else:
            signature[name] = NUMBERS.get(name, "i32")
        if name not in INTEGERS | NUMBERS.keys():
            aligned[place,] = [["tt.divisibility", 16]]
    places = {(list(signature).index(name),): value for name, value in constants.items()}
    options = triton_attention._effort(width * BYTES[dtype], rows)
    source = ASTSource(kernel, signature, constexprs=places, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def spilled(ptx: str, folder: Path) -> int:
    """Bytes that a thread writes out for want of registers."""
    target = re.findall(r"\.target (\w+)", ptx)[0]
    assembler = knobs.nvidia.ptxas_blackwell if target >= "sm_100" and len(target) > 5 else knobs.nvidia.ptxas
    (folder / "kernel.ptx").write_text(ptx)
    said = subprocess.run(
        [assembler.path, "-v", f"--gpu-name={target}", "--fmad=false", "kernel.ptx", "-o", "kernel.bin"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    return int(re.findall(r"(\d+) bytes spill stores", said)[0])


@pytest.mark.parametrize(
    ("capability", "dtype", "shared", "width", "rows", "more"),
    [
        (80, "fp16", 8, 256, 16, {"CAPPED": True, "STRETCHED": True}),
        (90, "bf16", 4, 128, 16, {}),
        (90, "bf16", 4, 128, 32, {}),
        (90, "fp32", 1, 64, 16, {}),
        (100, "bf16", 7, 80, 32, {"SINKS": True}),
    ],
)
def test_it_compiles_for_a_gpu_within_what_one_has(
    capability: int, dtype: str, shared: int, width: int, rows: int, more: dict[str, bool], tmp_path: Path
) -> None:
    kernel = compiled(capability, dtype, shared, width, rows, **more)
    ptx = kernel.asm["ptx"]
    assert kernel.metadata.shared <= 80 * 1024, "two and more of its programs fit on a multiprocessor"
    assert spilled(ptx, tmp_path) <= 64
    if dtype != "fp32":
        layouts = set(re.findall(r"nvidia_mma<\{.*?\}>", kernel.asm["ttgir"]))
        assert len(layouts) == 1 and "warpsPerCTA = [1, 4]" in str(layouts), "for the bits, with any rows"
        assert "fma.rn.f32" not in ptx, "a contracted operation gives other bits than the two"
    if width <= 128:
        assert re.search(r"cp\.async\.wait_group\s+2;", ptx), "keys are on their way while others are summed"
