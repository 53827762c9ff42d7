"""The benchmark of a step runs, and tells what it is for. The times are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.step import (
    DRAWN,
    LENGTHS,
    SESSIONS,
    bytes_of_a_step,
    fastest,
    first_token,
    main,
    products,
    together,
)
from benchmarks.verifier_host import microseconds
from outrider.engine.loading import load_engine, load_tokenizer
from outrider.engine.native import library
from outrider.engine.packed import PackedLinear
from tests.tiny_models import build

needs_compiler = pytest.mark.skipif(library() is None, reason="nothing can be compiled here")


def test_a_tiny_pair_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, kept = build("llama", tmp_path / "model", max_position_embeddings=4096), tmp_path / "result.json"
    main(str(model), str(model), "int8", context=32, rounds=1, verifier=False, write=kept)
    assert "share of the bandwidth" in capsys.readouterr().out
    result = json.loads(kept.read_text())
    step = result["step"]
    assert result["target"]["bit_exact"]
    assert step["t5_over_t1"] == pytest.approx(
        step["step_milliseconds"]["5"] / step["step_milliseconds"]["1"]
    )
    assert step["share_of_bandwidth"] == pytest.approx(
        step["step_gb_per_second"] / max(step["bandwidth_gb_per_second"].values())
    )
    assert step["products_milliseconds"].keys() == step["step_milliseconds"].keys()
    assert step["products_milliseconds"]["64"] > 0
    assert result["prefix"]["first_tokens_run"] == 1024
    assert result["prefix"]["second_tokens_run"] == 1024 - 1000 // 16 * 16
    assert min(result["host_microseconds_a_session"].values()) > 0
    assert min(result["drafter"]["step_milliseconds"].values()) > 0


@pytest.mark.parametrize(
    ("quantization", "of_layers", "of_head"),
    [(None, 4, 4), ("int8", 1, 1), pytest.param("int4", 0.625, 1.0625, marks=needs_compiler)],
)
def test_what_a_step_reads(
    quantization: str | None, of_layers: float, of_head: float, tmp_path: Path
) -> None:
    engine = load_engine(str(build("llama", tmp_path)), kv_memory_bytes=2**24, quantization=quantization)
    first_token(engine, [1] * 32)
    weights, kv = bytes_of_a_step(engine, 32)
    hidden, inner, keys, vocab, layers = 64, 96, 32, 199, 3
    per_layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * inner
    norms = 1 if quantization == "int8" else 2 * layers + 1  # the others are in the layers behind them
    expected = layers * per_layer * of_layers + hidden * vocab * of_head + 4 * hidden * norms
    assert weights == expected  # no embeddings
    assert kv == 4 * 2 * keys * layers * 32


def test_the_products_are_those_of_all_linear_layers(tmp_path: Path) -> None:
    model = load_engine(str(build("llama", tmp_path)), kv_memory_bytes=2**24).model
    ran: list[int] = []
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    for layer in layers:
        layer.forward = lambda x, forward=layer.forward: (ran.append(x.shape[0]), forward(x))[1]
    products(model, 7)()
    assert ran == [7] * len(layers) and len(layers) == 3 * 4 + 1  # qkv, o, gate and up, down; the head


def test_what_surrounds_the_forward_pass_is_the_sum_of_its_parts() -> None:
    host = {f"draw {name}, {sessions} sessions": 1.0 for name in DRAWN for sessions in SESSIONS}
    for sessions in SESSIONS:
        for length in LENGTHS:
            host[f"prepare, {sessions} sessions of {length}"] = 20.0
            host[f"plan, reconcile, messages, {sessions} sessions of {length}"] = 300.0 + length
    found = together(host)
    assert found["greedy, 64 sessions of 1024"] == found["temperature .8, 16 sessions of 1024"] == 1345.0
    assert len(found) == len(DRAWN) * len(SESSIONS) * len(LENGTHS)


@pytest.mark.process
def test_the_verifiers_part_is_measured_on_the_real_service(tmp_path: Path) -> None:
    folder = str(build("llama", tmp_path, max_position_embeddings=4096))
    info = load_engine(folder, kv_memory_bytes=2**24).info
    assert microseconds(info, load_tokenizer(folder), sessions=4, length=32, drafts=2, messages=2) > 0


def test_jobs_run_in_turn() -> None:
    order: list[str] = []
    seconds = fastest({name: lambda name=name: order.append(name) for name in "ab"}, 3, lambda: None)  # type: ignore[misc]
    assert order == list("ab" * 3)
    assert set(seconds) == set("ab") and all(value < 60 for value in seconds.values())
