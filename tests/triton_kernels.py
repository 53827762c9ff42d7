"""Triton's kernels without a GPU: run by its interpreter, and compiled for GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is for Linux on x86-64")

from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402


def interpreted(file: Path) -> None:
    """Runs the tests of a file in a process of their own: the interpreter has to be asked for before anything
    imports Triton."""
    tried = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file.name],
        cwd=file.parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert tried.returncode == 0, tried.stdout[-4000:] + tried.stderr[-2000:]
    assert " passed" in tried.stdout


def compiled(
    kernel: Any,
    capability: int,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    aligned: Collection[str] = (),
    **options: Any,
) -> Any:
    """Returns a kernel as it is compiled for GPUs of that capability. `types`: of arguments that are not
    32-bit integers. `aligned`: arguments that are multiples of 16."""
    names = [parameter.name for parameter in kernel.params]
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    places = {(names.index(name),): value for name, value in constants.items() if name in names}
    told = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name in aligned and name not in constants
    }
    source = ASTSource(kernel, signature, constexprs=places, attrs=told)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def spilled(ptx: str, folder: Path) -> int:
    """Returns how many bytes a thread writes out for want of registers."""
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
    return sum(int(count) for count in re.findall(r"(\d+) bytes spill stores", said))
