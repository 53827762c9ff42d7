"""A decoder by one call of native_decoder.cpp gives what its layers give one by one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.engine import Engine, Work
from outrider.engine.loading import load_engine
from outrider.engine.native import library
from outrider.engine.native_decoder import AT_ONCE, Rotations

pytestmark = pytest.mark.skipif(library() is None, reason="nothing can be compiled here")
TOKENS = [7, 150, 9, 30, 31, 8, 22, 5]


def loaded(folder: Path, quantization: str | None = None) -> Engine:
    return load_engine(str(folder), name="m", kv_memory_bytes=4 * 2**20, threads=2, quantization=quantization)


def logits(engine: Engine) -> list[torch.Tensor]:
    """Returns those of two sessions that run side by side, in steps of different lengths."""
    return [
        engine.step([Work([place], start, TOKENS[start:end], rows) for place in (0, 1)]).clone()
        for start, end, rows in ((0, 5, 2), (5, 6, 1), (6, 8, 2))
    ]


def with_norms_of_its_own(folder: Path, to: Path) -> Path:
    """Returns a copy of a checkpoint in which no norm's weights are one."""
    made = shutil.copytree(folder, to / "model")
    weights, generator = load_file(made / "model.safetensors"), torch.Generator().manual_seed(4)
    for name, weight in weights.items():
        if "norm" in name:
            weight.copy_(torch.rand(weight.shape, generator=generator) + 0.5)
    save_file(weights, made / "model.safetensors", {"format": "pt"})
    return made


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_it_gives_what_its_layers_give(
    arch: str, quantization: str | None, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    engine = loaded(with_norms_of_its_own(checkpoint(arch), tmp_path), quantization)
    decoder, engine.model.forward._decoder = engine.model.forward._decoder, None
    assert decoder is not None
    expected = logits(engine)
    engine.model.forward._decoder = decoder
    found = logits(engine)
    for some, others in zip(found, expected, strict=True):
        assert (some - others).norm() <= (0.02 if quantization else 1e-5) * others.norm()
        assert torch.equal(*some.chunk(2)), "two sessions with one text"


def test_a_model_whose_rotation_follows_the_length_runs_by_its_layers(tmp_path: Path) -> None:
    from tests.tiny_models import build

    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    engine = loaded(build("llama", tmp_path, rope_parameters=rope))
    assert engine.attention.name == "native" and engine.model.forward._decoder is None
    assert len(logits(engine)) == 3


class Rotary:
    """Gives numbers that show which positions were asked for."""

    rope_type = "default"

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, x: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked += places.numel()
        table = places[..., None].float() + torch.tensor([0.0, 0.25, 0.5, 0.75])
        return table, 2 * table


def test_tables_grow_with_the_positions() -> None:
    rotary: Any = Rotary()
    rotations = Rotations(rotary, 4)
    for end in (1, 5, AT_ONCE, AT_ONCE + 1, 5 * AT_ONCE, 3):
        cosines, sines = rotations.up_to(end)
        assert len(cosines) == len(sines) >= end
        places = torch.arange(len(cosines))[:, None] + torch.tensor([0.0, 0.25, 0.5, 0.75])
        assert torch.equal(cosines, places)
        assert torch.equal(sines, 2 * places * torch.tensor([-1.0, -1.0, 1.0, 1.0]))
    asked = rotary.asked
    rotations.up_to(5 * AT_ONCE)
    assert rotary.asked == asked, "what is there is not computed again"


@pytest.mark.parametrize(
    ("kind", "fits"),
    [
        ("default", True),
        ("llama3", True),
        ("yarn", True),
        ("dynamic", False),
        ("longrope", False),
        (None, False),
    ],
)
def test_which_rotations_have_tables(kind: str | None, fits: bool) -> None:
    rotary: Any = Rotary()
    rotary.rope_type = kind
    assert Rotations.fit(rotary) == fits


@pytest.mark.parametrize("token", [-1, 10**6, 2**62])
def test_a_token_without_an_embedding_is_refused(token: int, checkpoint: Callable[..., Path]) -> None:
    """Whoever let it come so far: native code would read what lies behind the embeddings."""
    engine = loaded(checkpoint("llama"))
    with pytest.raises(IndexError, match="no embedding"):
        engine.step([Work([0], 0, [7, token], 1)])
    assert len(logits(engine)) == 3
