"""Measures how well a model foretells a text, in 8 bits and without.

    python benchmarks/perplexity.py --target TARGET --text FILE --write benchmarks/results/NAME.json

The engine that serves reads the text, in windows of their own. Perplexity is e to the mean of -log p of a
window's tokens but the first, in nats; agreement is the share of positions whose likeliest token is that of
float32.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.keep import Target, Write, keep
from outrider.engine.engine import Engine
from outrider.engine.kv_blocks import BlockTable
from outrider.engine.loading import load_engine
from outrider.engine.step_inputs import Work
from outrider.engine.tokenizer import load_tokenizer

KV_BYTES = 2**28


def read(engine: Engine, windows: list[list[int]]) -> tuple[float, torch.Tensor]:
    """Returns the perplexity of the windows, and the likeliest token of each position."""
    told, likeliest = 0.0, []
    for number, window in enumerate(windows, 1):
        table = BlockTable()
        engine.pool.extend(table, len(window))
        logits = engine.step([Work(table.blocks, 0, window, len(window))]).float()
        engine.pool.close(table)
        scores = logits[:-1].log_softmax(-1).gather(1, torch.tensor(window[1:])[:, None])
        told -= float(scores.sum())
        likeliest.append(logits.argmax(-1))
        print(f"\r{number} of {len(windows)} windows", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return math.exp(told / sum(len(window) - 1 for window in windows)), torch.cat(likeliest)


def main(
    target: Target,
    text: Annotated[list[Path], typer.Option(help="File of text; more than one may be given.")],
    window: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 512,
    windows: Annotated[int, typer.Option(min=1, help="Windows at most.")] = 12,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the processor.")] = 1,
    write: Write = None,
) -> None:
    """Read a text with a model in float32 and in 8 bits."""
    torch.set_num_threads(threads)
    tokenizer = Tokenizer.from_str(load_tokenizer(target).json)
    ids = tokenizer.encode("\n".join(one.read_text("utf-8") for one in text)).ids
    parts = [ids[start : start + window] for start in range(0, len(ids) - window + 1, window)][:windows]
    if not parts:
        raise SystemExit(f"--text has {len(ids)} tokens; a window takes {window}: give more text")
    found: dict[str, object] = {"tokens": window * len(parts)}
    plain, expected = read(load_engine(target, kv_memory_bytes=KV_BYTES), parts)
    rounded, likeliest = read(load_engine(target, kv_memory_bytes=KV_BYTES, quantization="int8"), parts)
    found |= {
        "perplexity": {"float32": plain, "int8": rounded},
        "int8_over_float32": rounded / plain,
        "agreement": float((likeliest == expected).float().mean()),
    }
    print(f"float32 {plain:.3f}, int8 {rounded:.3f} ({rounded / plain - 1:+.2%})")
    print(f"likeliest token the same at {found['agreement']:.1%} of {found['tokens']} positions")
    keep(write, found)


if __name__ == "__main__":
    typer.run(main)
