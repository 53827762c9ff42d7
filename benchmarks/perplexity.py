"""Measures how well a model foretells a text: in float32, in 8 bits and with weights of 4.

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
KINDS = ("int8", "int4")


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
    """Read a text with a model in float32, and rounded."""
    torch.set_num_threads(threads)
    tokenizer = Tokenizer.from_str(load_tokenizer(target).json)
    ids = tokenizer.encode("\n".join(one.read_text("utf-8") for one in text)).ids
    parts = [ids[start : start + window] for start in range(0, len(ids) - window + 1, window)][:windows]
    if not parts:
        raise SystemExit(f"--text has {len(ids)} tokens; a window takes {window}: give more text")
    plain, expected = read(load_engine(target, kv_memory_bytes=KV_BYTES), parts)
    perplexity, agreement = {"float32": plain}, dict[str, float]()
    print(f"float32 {plain:.3f}, of {window * len(parts)} tokens")
    for kind in KINDS:
        engine = load_engine(target, kv_memory_bytes=KV_BYTES, quantization=kind)
        perplexity[kind], likeliest = read(engine, parts)
        agreement[kind] = float((likeliest == expected).float().mean())
        print(f"{kind} {perplexity[kind]:.3f} ({perplexity[kind] / plain - 1:+.2%})")
        print(f"the likeliest token is the same at {agreement[kind]:.1%} of positions")
    over = {kind: perplexity[kind] / plain for kind in KINDS}
    keep(
        write,
        {
            "tokens": window * len(parts),
            "perplexity": perplexity,
            "over_float32": over,
            "agreement": agreement,
        },
    )


if __name__ == "__main__":
    typer.run(main)
