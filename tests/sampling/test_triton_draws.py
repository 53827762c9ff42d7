"""The kernels that draw tokens, as far as a machine without a GPU can tell."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.sampling.draw_kernels import Kernels, draw_kernels
from outrider.sampling.sampler import draw

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
FLOATS = {"logits": "fp32", "sums": "fp32", "numbers": "fp32"} | dict.fromkeys(
    ("temperatures", "top_ps", "floors", "factors"), "fp64"
)
NUMBERS = ("first", "width", "stride", "source_stride", "mask_stride", "count", "tiles")
WIDE = {"TILE": 1024, "PADDED": 128}  # a vocabulary of 128k

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def test_in_the_interpreter_they_give_what_a_cpu_gives() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*program, str(HERE / "interpreted_draws.py")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert re.search(r"\d+ passed", run.stdout)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_they_compile_for_a_gpu_and_keep_their_numbers_in_registers(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("kernels are interpreted in this process")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from outrider.sampling import triton_changes, triton_cuts, triton_draws

    plain = {"NAMED": False, "ids_of": None}
    cut = {**plain, **WIDE, "TILE": triton_cuts.TILE}
    score = {**WIDE, "num_warps": triton_draws.WARPS, "out": "i64"}
    none = {"masks": None, "mask_at": None, "rows": None}
    for kernel, told in (
        (
            triton_draws.take,
            {**plain, **none, "SOURCE": True, "ROWS": False, "MASKED": False, "TILE": 1024, "source": "bf16"},
        ),
        (
            triton_draws.score,
            {**plain, **score, "CUT": False, "COUNT": 1, "SHARES": False, "cuts": None},
        ),
        (triton_draws.score, {**score, "NAMED": True, "CUT": True, "COUNT": 4, "SHARES": True}),
        (triton_draws.merge_shares, {"NAMED": True, "COUNT": 4, "PADDED": 128, "WIDE": 512, "out": "i32"}),
        (triton_cuts.count_part, {**cut, "MASS": 1, "PART": 2, "num_warps": triton_cuts.WARPS}),
        (triton_cuts.narrow, {"MASS": 1, "PART": 2, "BINS": triton_cuts.BINS.value}),
        (triton_cuts.find_cut, {**cut, "num_warps": triton_cuts.WARPS}),
        (triton_changes.penalize, {"ENTRIES": triton_changes.ENTRIES, "ids": "i32"}),
    ):
        assert spilled(kernel, told, capability, tmp_path) == 0, (kernel, told)


@pytest.mark.gpu
def test_on_a_gpu_they_give_what_a_cpu_gives() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    from tests.sampling import interpreted_draws as drawn

    for seed in range(40):
        rng = random.Random(seed)
        rows = [drawn.any_row(rng, shaped=index % 2 > 0) for index in range(8)]
        logits, limit = drawn.logits_of(rng, len(rows)), rng.choice([drawn.VOCAB, 1200])
        there = logits.cuda()
        expected = draw(logits, rows, limit).tolist()
        assert kernel_draws_of(there).draw(there, rows, limit).tolist() == expected
        alone = [int(draw(there[index : index + 1], [row], limit)) for index, row in enumerate(rows)]
        assert alone == expected


def kernel_draws_of(logits: torch.Tensor) -> Kernels:
    kernels = draw_kernels(logits.device, logits.shape[1])
    assert kernels is not None
    return kernels


def spilled(kernel: Any, told: dict[str, Any], capability: int, folder: Path) -> int:
    """Bytes that a thread has no registers for. `told`: constants, and the types of what pointers lead to."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = [parameter.name for parameter in kernel.params]
    constants = {name: told[name] for name in names if name in told and not is_type(told[name])}
    types = {}
    for name in names:
        if name in constants:
            types[name] = "constexpr"
        elif name in NUMBERS:
            types[name] = "i32"
        else:
            types[name] = "*" + (told.get(name) or FLOATS.get(name, "i64"))
    source = ASTSource(kernel, types, {(names.index(name),): value for name, value in constants.items()})
    options = {"num_warps": told.get("num_warps", 4)}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    code = folder / "kernel.ptx"
    code.write_text(made.asm["ptx"])
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    tool = tools / ("ptxas-blackwell" if capability >= 100 else "ptxas")
    found = re.search(r"\.target (\w+)", made.asm["ptx"])
    assert found is not None
    run = subprocess.run(
        [tool if tool.exists() else tools / "ptxas", "-v", f"--gpu-name={found[1]}", code, "-o", "/dev/null"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return sum(int(count) for count in re.findall(r"(\d+) bytes spill stores", run.stderr))


def is_type(value: object) -> bool:
    return isinstance(value, str)
