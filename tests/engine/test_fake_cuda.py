"""What a recorded step asks of a GPU, traced without one: an operation for which the host would wait, or that
takes one tensor from each side, could not be recorded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

from tests.forked import said

FOLDER = Path(__file__).parent / "fake_cuda"
ARCHS = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gpt2",
    "opt",
    "phi3",
    "gpt_neox",
    "olmo2",
    "granite",
    "gemma2",
    "gemma3",
    "mixtral",
)
USUAL = ARCHS[:4]  # that run by a pass of kernels
OF_A_LAYER, AROUND_LAYERS = 8, 4  # kernels: the last norm, the head, and two that draw
MOST_LAUNCHES = 90  # by torch, of a layer of another decoder, before they are joined
MORE_NORMS = 105  # the same of Gemma 3, which has six norms a layer
AROUND = 40  # by torch, of a step beside its layers
DRAWS = 19  # kernels, of which those that top-k and top-p take are most


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What torch without CUDA lacks to run anything on such tensors."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    library = tmp_path_factory.mktemp("guard") / "guard.so"
    root = Path(torch.__file__).parent
    includes = (f"-I{root / 'include'}", f"-I{sysconfig.get_paths()['include']}")
    command = [compiler, "-O0", "-shared", "-fPIC", "-std=c++20", *includes, str(FOLDER / "guard.cpp")]
    subprocess.run([*command, f"-L{root / 'lib'}", "-lc10", "-o", str(library)], check=True, timeout=120)
    return library


def test_recorded_steps_wait_for_nothing_and_stay_on_the_device(guard: Path) -> None:
    """In a process of its own, as all that runs beside would believe in the GPU."""
    told = json.loads(said(("tests.engine.fake_cuda.trace", str(guard), *ARCHS)).splitlines()[-1])
    assert told.pop("one that waits")["faults"], "a fault is seen"
    assert set(told) == set(ARCHS)
    for arch, found in told.items():
        assert found["faults"] == [], arch
        layers, usual = found["layers"], arch in USUAL
        assert found["by_kernels"] == usual, arch
        most = 0 if usual else MORE_NORMS if arch == "gemma3" else MOST_LAUNCHES
        assert 0 < found["launches"] <= most * layers + AROUND, arch
        assert found["kernels"] <= OF_A_LAYER * layers + AROUND_LAYERS, arch
        assert not usual or found["kernels"] == OF_A_LAYER * layers + AROUND_LAYERS, arch
        assert 0 < found["draws"] <= DRAWS, arch
