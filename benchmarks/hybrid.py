"""Measures what drafts add to a step of a model with recurrent states, beside one that only attends.

    python benchmarks/hybrid.py --write benchmarks/results/hybrid-step.json

Both are random, of some 200 M parameters, on one core in float32. A step of one row is set against steps that
verify drafts as well: none of them is accepted, or all, which the next step takes into its states.
Figures are the fastest of steps in turn: what disturbs a step makes it slower. Text plays no part here.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.keep import Write, keep
from outrider.engine.engine import Engine, Work
from outrider.engine.kv_blocks import BlockTable
from outrider.engine.loading import load_engine

CONTEXT = 256  # tokens before the steps
STEPS = ((0, 0), (4, 0), (4, 4), (8, 0), (8, 8))  # drafts, and how many of them are accepted
HIDDEN = 1024
KINDS: Mapping[str, tuple[str, int, dict[str, Any]]] = {  # its type, its layers, and what is its own
    "attention": ("qwen3", 16, {}),
    "gated delta rule": (
        "qwen3_next",
        12,
        {
            "mlp_only_layers": list(range(12)),
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 3,
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 16,
        },
    ),
    "Mamba-2": ("bamba", 12, {"attn_layer_indices": [3, 7, 11], "mamba_n_heads": 32, "mamba_d_state": 128}),
}


def build(kind: str, folder: Path, hidden: int) -> None:
    """Saves a random model of a kind; all but its heads of states is as wide as `hidden` says."""
    model_type, layers, own = KINDS[kind]
    config = AutoConfig.for_model(
        model_type,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 256,
        head_dim=64,
        vocab_size=8 * hidden,
        max_position_embeddings=4096,
        **({**own, "mamba_n_heads": hidden // 32} if "mamba_n_heads" in own else own),
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def step_seconds(engine: Engine, table: BlockTable, drafts: int, accepted: int) -> float:
    """Returns the seconds of a step of a session, which keeps its token and what was accepted."""
    start = table.length
    engine.pool.extend(table, 1 + drafts)
    work = Work(table.blocks, start, list(range(1, 2 + drafts)), 1 + drafts)
    began = time.perf_counter()
    engine.forward(engine.prepare([work]))
    seconds = time.perf_counter() - began
    engine.pool.truncate(table, start + 1 + accepted)
    return seconds


def measured(engine: Engine, rounds: int) -> dict[str, Any]:
    """Returns the milliseconds of each kind of step, and what it costs of the one without drafts."""
    tables = [BlockTable() for _ in STEPS]
    for table in tables:
        engine.pool.extend(table, CONTEXT)
        engine.step([Work(table.blocks, 0, [1] * CONTEXT, 1)])
    seconds: list[list[float]] = [[] for _ in STEPS]
    for _ in range(rounds):
        for table, found, step in zip(tables, seconds, STEPS, strict=True):
            found.append(step_seconds(engine, table, *step))
    names = [f"{drafts} drafts, {accepted} accepted" for drafts, accepted in STEPS]
    fastest = [min(found[1:]) for found in seconds]  # the first has nothing to take in
    return {
        "parameters": engine.info.parameters,
        "bit_exact": engine.info.bit_exact,
        "milliseconds": {name: each * 1e3 for name, each in zip(names, fastest, strict=True)},
        "of_one_row": {name: each / fastest[0] for name, each in zip(names, fastest, strict=True)},
    }


def main(
    rounds: Annotated[int, typer.Option(min=2, help="Steps of each kind.")] = 30,
    hidden: Annotated[int, typer.Option(min=256, help="Width of the models.")] = HIDDEN,
    write: Write = None,
) -> None:
    """Measure what drafts add to a step of a model with recurrent states."""
    found = {}
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            build(kind, Path(folder), hidden)
            engine = load_engine(folder, threads=1, kv_memory_bytes=2**29)
        found[kind] = measured(engine, rounds)
        costs = ", ".join(f"{name}: {cost:.2f}" for name, cost in found[kind]["of_one_row"].items())
        print(f"{kind}, {found[kind]['parameters'] / 1e6:.0f} M: {costs}", flush=True)
    keep(write, {"context": CONTEXT, "models": found})


if __name__ == "__main__":
    typer.run(main)
