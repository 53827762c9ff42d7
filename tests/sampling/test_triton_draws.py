"""The kernels that draw tokens, as far as a machine without a GPU can tell."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.sampling.draw_kernels import Kernels, draw_kernels
from outrider.sampling.sampler import draw
from tests.triton_kernels import compiled, interpreted, spilled

FLOATS = {"logits": "fp32", "sums": "fp32", "numbers": "fp32"} | dict.fromkeys(
    ("temperatures", "top_ps", "floors", "factors"), "fp64"
)
NUMBERS = ("first", "width", "stride", "source_stride", "mask_stride", "count", "tiles")
WIDE = {"TILE": 1024, "PADDED": 128}  # a vocabulary of 128k


def test_in_the_interpreter_they_give_what_a_cpu_gives() -> None:
    interpreted(Path(__file__).with_name("interpreted_draws.py"))


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_they_compile_for_a_gpu_and_keep_their_numbers_in_registers(capability: int, tmp_path: Path) -> None:
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
        (
            triton_draws.take,
            {
                "SOURCE": False,
                "ROWS": True,
                "NAMED": True,
                "MASKED": True,
                "TILE": 1024,
                "source": "fp32",
                "masks": "u8",
            },
        ),
        (triton_draws.merge, {**none, "PADDED": 128, "ROWS": False, "KEYS": True}),
        (triton_draws.merge, {"PADDED": 128, "ROWS": True, "KEYS": False}),
        (triton_draws.merge_shares, {"NAMED": True, "COUNT": 4, "PADDED": 128, "WIDE": 512, "out": "i32"}),
        (triton_cuts.count_part, {**cut, "MASS": 1, "PART": 2, "num_warps": triton_cuts.WARPS}),
        (triton_cuts.narrow, {"MASS": 1, "PART": 2, "BINS": triton_cuts.BINS.value}),
        (triton_cuts.find_cut, {**cut, "num_warps": triton_cuts.WARPS}),
        (triton_changes.penalize, {"ENTRIES": triton_changes.ENTRIES, "ids": "i32"}),
        (triton_changes.add_biases, {"ENTRIES": triton_changes.ENTRIES, "ids": "i32"}),
    ):
        assert spilled(drawing(kernel, told, capability), tmp_path) == 0, (kernel, told)


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


def drawing(kernel: Any, told: dict[str, Any], capability: int) -> str:
    """Returns a kernel's PTX. `told`: constants, and the types of what pointers lead to."""
    names = [parameter.name for parameter in kernel.params if parameter.name not in NUMBERS]
    leads_to = {name: told.get(name, FLOATS.get(name, "i64")) for name in names}
    types = {name: f"*{kind}" for name, kind in leads_to.items() if isinstance(kind, str)}
    constants = {name: told[name] for name in names if name in told and name not in types}
    made = compiled(kernel, capability, types, constants, num_warps=told.get("num_warps", 4))
    return str(made.asm["ptx"])
