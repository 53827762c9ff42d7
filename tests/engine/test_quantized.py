"""A model in 8 bits: nearly the same numbers, its own to the bit, and the same answers in any company."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType
from torch import nn

from drafter.config import DrafterConfig
from outrider.engine import loading
from outrider.engine.engine import Engine
from outrider.engine.invariance import linears_keep_bits
from outrider.engine.kv_blocks import BlockTable
from outrider.engine.loading import load_engine
from outrider.engine.native import library
from outrider.engine.packed import MAX_ROWS, PackedColumns, pack
from outrider.engine.quantized import Int8Linear, largest_weight
from outrider.engine.step_inputs import Work
from outrider.errors import StartupError
from outrider.options.engine import EngineOptions
from outrider.options.option import build
from outrider_cli.children import Models, Workers, worker_children
from tests.forked import said
from tests.gguf_files import write_gguf
from verifier.config import VerifierConfig

needs_compiler = pytest.mark.skipif(library() is None, reason="nothing can be compiled here")
PROMPT = [(7 * i) % 198 + 1 for i in range(40)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def logits(engine: Engine, chunks: list[int]) -> torch.Tensor:
    table, found, start = BlockTable(), [], 0
    for chunk in chunks:
        engine.pool.extend(table, chunk)
        part = PROMPT[start : start + chunk]
        found.append(engine.step([Work(table.blocks, start, part, chunk)]).clone())
        start += chunk
    return torch.cat(found)


@pytest.mark.parametrize("quantization", ["int8", pytest.param("int4", marks=needs_compiler)])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_a_rounded_engine_keeps_bits_and_gives_nearly_the_same_logits(
    architecture: str, quantization: str, checkpoint: Callable[..., Path]
) -> None:
    folder, told = str(checkpoint(architecture)), []
    plain = logits(load_engine(folder, kv_memory_bytes=2**24), [len(PROMPT)])
    engine = load_engine(
        folder, kv_memory_bytes=2**24, quantization=quantization, progress=lambda stage, _: told.append(stage)
    )
    info = engine.info
    assert (info.dtype, info.quantization, info.bit_exact) == ("float32", quantization, True)
    found = logits(engine, [len(PROMPT)])
    assert torch.equal(logits(engine, [1, 16, 1, 20, 2]), found)
    apart = (found - plain).norm() / plain.norm()
    assert (
        1e-4 < apart < (0.5 if quantization == "int8" else 1.0)
    )  # rounded, which sharp random weights make much of, and no more than that
    assert any("rounded so, logits are" in stage for stage in told)


def test_a_product_in_8_bits_does_not_depend_on_the_number_of_rows() -> None:
    layer = Int8Linear(random(96, 512), random(96))
    x = random(MAX_ROWS + 1, 512, seed=1)  # one row beyond a product's limit
    x[5] = 0.0
    x[7] *= 1e6  # its scale is its own affair
    whole, expected = layer(x), F.linear(x, random(96, 512), random(96))
    assert ((whole - expected).norm(dim=1) < 0.02 * expected.norm(dim=1) + 1e-6).all()
    for rows in (slice(0, 1), slice(5, 6), slice(3, 5), slice(100, 117), slice(1, None)):
        assert torch.equal(layer(x[rows]), whole[rows])
    assert torch.equal(layer(x[:6].view(1, 2, 3, 512)), whole[:6].view(1, 2, 3, 96))
    assert linears_keep_bits(nn.Sequential(layer))


def test_numbers_far_above_the_rest_of_a_row_do_not_erase_it() -> None:
    """Activations of real models are so: a few channels hold a hundred times what the others do."""
    weight, x = random(96, 512), random(8, 512, seed=1)
    x[:, 3] *= 300
    weight[:, 3] = 0.0  # so that only the rest is seen
    found, expected = Int8Linear(weight, None)(x), F.linear(x, weight)
    assert ((found - expected).norm(dim=1) < 0.02 * expected.norm(dim=1)).all()


def test_every_linear_layer_is_rounded(checkpoint: Callable[..., Path]) -> None:
    model: Any = nn.Sequential(nn.Linear(64, 32), nn.Sequential(nn.Linear(32, 8))).requires_grad_(False)
    pack(model, Int8Linear)
    engine = load_engine(str(checkpoint("llama")), kv_memory_bytes=2**24, quantization="int8")
    kinds = {type(module) for each in (model, engine.model) for module in each.modules()}
    assert {Int8Linear, PackedColumns} <= kinds and nn.Linear not in kinds


def test_weights_have_a_bit_less_where_sums_of_two_products_would_overflow() -> None:
    program = "from outrider.engine.quantized import largest_weight; print(largest_weight())"
    assert int(said(("-c", program), ONEDNN_MAX_CPU_ISA="AVX2")) == 63 <= largest_weight()


@pytest.mark.parametrize("role", [VerifierConfig, DrafterConfig])
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"quantization": "int2"}, "--quantization must be one of int8, int4, fp8, auto, not 'int2'"),
        ({"device": "cuda", "quantization": "int4"}, "int4 is not for --device cuda: give int8 or fp8"),
        ({"device": "cuda", "quantization": "auto"}, "auto is not for --device cuda: give int8 or fp8"),
        ({"device": "cuda", "dtype": "float32"}, "on a GPU is for 16 bits, not cuda in float32"),
        ({"quantization": "fp8"}, "fp8 is not for --device cpu: give int8 or int4"),
        ({"dtype": "bfloat16"}, "not cpu in bfloat16"),
        ({"tensor_parallel_size": 2}, "a model in one process"),
    ],
)
def test_refused_where_it_cannot_be(role: type, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(StartupError, match=sentence):
        build(role, {"target": "t", "draft": "d", "quantization": "int8", **settings})


@pytest.mark.parametrize(("both", "draft"), [("int8", None), (None, "int8")])
def test_serve_hands_it_to_those_that_it_is_for(both: str | None, draft: str | None) -> None:
    engine = EngineOptions(quantization=both)
    workers = Workers(verifiers=1, drafters=1, engine=engine, draft_quantization=draft)
    verifier, drafter = worker_children(Models("T", "D", "n"), workers, "127.0.0.1:1")
    assert ("--quantization" in verifier.command) == (both is not None)
    assert "--quantization" in drafter.command


@pytest.mark.parametrize(("exact", "quantization"), [(True, "int8"), (False, "")])
def test_auto_takes_8_bits_where_they_are_exact(
    exact: bool, quantization: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "exact_here", lambda: exact)
    engine = load_engine(str(checkpoint("llama")), kv_memory_bytes=2**24, quantization="auto")
    assert (engine.info.quantization, engine.info.bit_exact) == (quantization, True)


@needs_compiler
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_a_file_in_4_bits_gives_its_own_numbers(
    kind: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    file = write_gguf(checkpoint("llama"), tmp_path / "file.gguf", GGMLQuantizationType[kind])
    plain = logits(load_engine(str(file), kv_memory_bytes=2**24), [len(PROMPT)])
    engine = load_engine(str(file), kv_memory_bytes=2**24, quantization="int4")
    assert (engine.info.quantization, engine.info.bit_exact) == ("int4", True)
    found = logits(engine, [len(PROMPT)])
    assert (found - plain).norm() < 0.01 * plain.norm()  # only the head is rounded again, to 8 bits


@needs_compiler
@pytest.mark.parametrize("of_bytes", [False, True])
@pytest.mark.parametrize(("kind", "kept"), [("Q4_0", True), ("Q4_1", True), ("Q8_0", False), ("F32", False)])
def test_auto_takes_4_bits_where_weights_have_no_more_and_8_are_no_faster(
    kind: str,
    kept: bool,
    of_bytes: bool,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "exact_here", lambda: True)
    monkeypatch.setattr(loading, "multiplies_bytes", lambda: of_bytes)
    file = write_gguf(checkpoint("llama"), tmp_path / "file.gguf", GGMLQuantizationType[kind])
    engine = load_engine(str(file), kv_memory_bytes=2**24, quantization="auto")
    expected = "int4" if kept and not of_bytes else "int8"
    assert (engine.info.quantization, engine.info.bit_exact) == (expected, True)


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_4_bits_are_refused(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(StartupError, match="int4 needs a C"):
        load_engine(str(checkpoint("llama")), kv_memory_bytes=2**24, quantization="int4")
