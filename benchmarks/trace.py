"""Records how a draft fares at every position of its target's text: what calibration and simulation run on.

    python benchmarks/trace.py --target demo/models/target --draft demo/models/draft --write FILE.npz

The target writes a continuation of each prompt; the draft model reads it in one pass and says, at each
position, what it would have drafted and how clearly that won. One record a position: the shares of the best
tokens in the draw, and which of them was the target's.
"""

from __future__ import annotations

import pydoc_data.topics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer
from rich.progress import track
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from demo.heldout import heldout_prompts
from outrider.engine.engine import Engine, Work
from outrider.engine.loading import load_engine
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row

RANKS = 4  # the token and what would be drafted in its place
KV_BYTES = 2**29
PROSE_LINES = 12  # of a help topic, as a prompt


@dataclass
class Trace:
    """One text, position by position."""

    workload: str
    temperature: float
    shares: list[tuple[float, ...]] = field(default_factory=list)  # of the RANKS best, best first
    right: list[int] = field(default_factory=list)  # which of them was the target's token; -1 = none


def save(traces: Sequence[Trace], path: Path) -> None:
    """Saves the traces. Shares are kept in steps of 1 / 65535."""
    np.savez_compressed(
        path,
        workload=np.array([trace.workload for trace in traces]),
        temperature=np.array([trace.temperature for trace in traces]),
        shares=np.rint(np.array([trace.shares for trace in traces]) * 65535).astype(np.uint16),
        right=np.array([trace.right for trace in traces], dtype=np.int8),
    )


def read(path: Path) -> list[Trace]:
    """Returns what `save` kept."""
    with np.load(path) as kept:
        columns = [kept[name].tolist() for name in ("workload", "temperature", "right")]
        shares = (kept["shares"] / 65535).tolist()
    return [Trace(w, t, [*map(tuple, s)], r) for w, t, r, s in zip(*columns, shares, strict=True)]


def continue_text(engine: Engine, prompt: Sequence[int], count: int, sampling: SamplingParams) -> list[int]:
    """Returns `count` tokens after the prompt, end of text or not."""
    table = engine.pool.open([])
    tokens, log = list(prompt), list(prompt)
    try:
        while len(log) < len(prompt) + count:
            start = table.length
            engine.pool.extend(table, len(tokens))
            work = Work(table.blocks, start, tokens, 1)
            tokens = engine.choose(engine.prepare([work]), [Row(sampling, len(log), None, ())])
            log += tokens
    finally:
        engine.pool.close(table)
    return log[len(prompt) :]


def record(
    engine: Engine, prompt: Sequence[int], output: Sequence[int], sampling: SamplingParams, workload: str
) -> Trace:
    """Returns what the draft model would have said at each position of the output."""
    trace = Trace(workload, sampling.temperature)
    table = engine.pool.open([])
    tokens = [*prompt, *output[:-1]]
    engine.pool.extend(table, len(tokens))
    rows = [Row(sampling, len(prompt) + index, None, ()) for index in range(len(output))]
    work = Work(table.blocks, 0, tokens, len(rows))
    for ranked, token in zip(engine.rank(engine.prepare([work]), rows, RANKS), output, strict=True):
        trace.shares.append(ranked.shares)
        trace.right.append(ranked.ids.index(token) if token in ranked.ids else -1)
    engine.pool.close(table)
    return trace


def calibration_error(predicted: Sequence[float], happened: Sequence[bool], bins: int = 10) -> float:
    """Returns the expected calibration error: over equal bins of the prediction, the mean distance between
    what was predicted and what happened, weighted by their size (Naeini et al. 2015)."""
    values: npt.NDArray[np.float64] = np.asarray(predicted)
    outcomes = np.asarray(happened, dtype=np.float64)
    which = np.minimum((values * bins).astype(int), bins - 1)
    gaps = [abs(float(values[which == b].sum() - outcomes[which == b].sum())) for b in range(bins)]
    return sum(gaps) / len(values)


def prose_prompts(count: int) -> list[str]:
    """Returns the beginnings of as many help topics: English text that the demo pair was not trained on."""
    topics = sorted(pydoc_data.topics.topics.items())
    long = [text.splitlines() for _, text in topics if len(text.splitlines()) > 2 * PROSE_LINES]
    return ["\n".join(lines[:PROSE_LINES]).rstrip() for lines in long[:: max(1, len(long) // count)][:count]]


def main(
    target: Annotated[str, typer.Option(help="Folder of the target.")] = "demo/models/target",
    draft: Annotated[str, typer.Option(help="Folder of the draft model.")] = "demo/models/draft",
    prompts: Annotated[int, typer.Option(min=1, help="Texts for each workload and temperature.")] = 24,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each text.")] = 96,
    write: Annotated[Path | None, typer.Option(help="File to keep the traces in (.npz).")] = None,
) -> None:
    """Record what a draft model would have drafted at each position of its target's text."""
    target_engine = load_engine(target, name="target", kv_memory_bytes=KV_BYTES, threads=1)
    draft_engine = load_engine(draft, name="draft", kv_memory_bytes=KV_BYTES, threads=1)
    tokenizer = AutoTokenizer.from_pretrained(target)
    traces = []
    texts = [("code", text) for text in heldout_prompts(prompts)]
    texts += [("prose", text) for text in prose_prompts(prompts)]
    cases = [(name, text, temperature) for temperature in (0.0, 0.8) for name, text in texts]
    for number, (name, text, temperature) in enumerate(track(cases, "Recording")):
        prompt = tokenizer.encode(text)
        sampling = SamplingParams(temperature=temperature, seed=number)
        output = continue_text(target_engine, prompt, max_tokens, sampling)
        traces.append(record(draft_engine, prompt, output, sampling, name))
    for kind in sorted({(trace.workload, trace.temperature) for trace in traces}):
        some = [trace for trace in traces if (trace.workload, trace.temperature) == kind]
        right = [rank for trace in some for rank in trace.right]
        missed = [rank for rank in right if rank != 0]
        print(
            f"{kind[0]}, temperature {kind[1]}: {right.count(0) / len(right):.3f} right, of the others "
            f"{missed.count(1) / len(missed):.3f} the runner-up, {missed.count(2) / len(missed):.3f} the next"
        )
    if write is not None:
        save(traces, write)


if __name__ == "__main__":
    typer.run(main)
