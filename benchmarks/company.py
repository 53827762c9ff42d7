"""Measures what one session's parameters cost those that share its steps.

    python benchmarks/company.py --write benchmarks/results/company-epyc.json

Steps of sixteen sessions, each with its last token and four drafts, of the demo target; and steps of the demo
draft model. All sessions ask for the same, but one, which asks for something else. Told is the processor time
of such a step over that of a step in which it asks for what the others do. Some parameters cost more with a
large vocabulary, so draws alone are measured there, too, of random logits: their ratio is larger than that of
steps, since a model with such a vocabulary spends more on its last layer than on draws. Of several rounds the
fastest counts.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.keep import Write, keep
from benchmarks.step import works
from outrider.engine.engine import Engine
from outrider.engine.loading import load_engine
from outrider.sampling.params import MAX_BIASES, SamplingParams
from outrider.sampling.sampler import Row, TokenCounts, draw, rank

CONSOLE = Console()
ROOT = Path(__file__).resolve().parent.parent
SESSIONS = 16
DRAFTS = 4
LENGTH = 256  # of the sessions
LARGE_VOCABULARY = 151_936
DISTINCT = 4000  # tokens of the text before, where it counts
ODD: dict[str, dict[str, Any]] = {
    "the same": {},
    "greedy": {"temperature": 0.0},
    "temperature 100": {"temperature": 100.0},
    "temperature 1e-30": {"temperature": 1e-30},
    "temperature .02": {"temperature": 0.02},
    "top_k 1": {"top_k": 1},
    "top_k 4,000": {"top_k": 4000},
    "top_p .9": {"top_p": 0.9},
    "top_p .999, temperature 100": {"top_p": 0.999, "temperature": 100.0},
    "top_p .999, temperature .02": {"top_p": 0.999, "temperature": 0.02},
    "min_p .1": {"min_p": 0.1},
    f"logit_bias of {MAX_BIASES}": {"logit_bias": dict.fromkeys(range(0, 4 * MAX_BIASES, 4), 1.0)},
    "penalties, a text of 4,000 tokens": {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
    },
    "all of them": {
        "temperature": 100.0,
        "top_k": 4000,
        "top_p": 0.999,
        "min_p": 1e-9,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "logit_bias": dict.fromkeys(range(0, 4 * MAX_BIASES, 4), 1.0),
    },
}
ORDINARY = {"temperature .8": SamplingParams(temperature=0.8), "greedy": SamplingParams(temperature=0.0)}
Timed = Callable[[], object]


def company(ordinary: SamplingParams, odd: Mapping[str, Any], drafts: int) -> list[Row]:
    """Returns the rows of a step in which the first session asks for something else."""
    history = TokenCounts(range(DISTINCT), range(DISTINCT // 2))
    rows = []
    for session in range(SESSIONS):
        params = replace(ordinary, seed=session, **(odd if session == 0 else {}))
        drafted = list(range(3, 3 + drafts))
        rows += [
            Row(params, LENGTH + depth, history if params.penalized else None, drafted[:depth])
            for depth in range(1 + drafts)
        ]
    return rows


def ratios(jobs: Mapping[str, Timed], rounds: int, tick: Timed) -> dict[str, float]:
    """Returns each job's processor time over that of the first: of several rounds the fastest."""
    seconds = dict.fromkeys(jobs, float("inf"))
    order, rng = list(jobs), random.Random(1)
    for _ in range(rounds):
        rng.shuffle(order)
        for name in order:
            began = time.thread_time()
            jobs[name]()
            seconds[name] = min(seconds[name], time.thread_time() - began)
        tick()
    first = next(iter(seconds.values()))
    return {"milliseconds": first * 1e3} | {name: value / first for name, value in seconds.items()}


def steps_of(engine: Engine, ordinary: SamplingParams) -> dict[str, Timed]:
    """Returns the verifier's steps, by what one of the sessions asks for."""
    batch = works(engine, SESSIONS, LENGTH, 1 + DRAFTS)
    rows = {name: company(ordinary, odd, DRAFTS) for name, odd in ODD.items()}
    return {name: lambda some=some: engine.choose(engine.prepare(batch), some) for name, some in rows.items()}  # type: ignore[misc]


def drafts_of(engine: Engine, ordinary: SamplingParams) -> dict[str, Timed]:
    """Returns the drafter's steps."""
    batch = works(engine, SESSIONS, LENGTH, 1)
    rows = {name: company(ordinary, odd, 0) for name, odd in ODD.items()}
    return {
        name: lambda some=some: engine.rank(engine.prepare(batch), some, 3) for name, some in rows.items()
    }  # type: ignore[misc]


def draws_of(vocab_size: int, ordinary: SamplingParams, drafter: bool) -> dict[str, Timed]:
    """Returns draws alone, without a model."""
    drafts = 0 if drafter else DRAFTS
    logits = torch.randn(SESSIONS * (1 + drafts), vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    rows = {name: company(ordinary, odd, drafts) for name, odd in ODD.items()}
    if drafter:
        return {name: lambda some=some: rank(logits, some, 3) for name, some in rows.items()}  # type: ignore[misc]
    return {name: lambda some=some: draw(logits, some) for name, some in rows.items()}  # type: ignore[misc]


def show(result: Mapping[str, Mapping[str, float]]) -> None:
    """Prints the ratios as a table."""
    table = Table("one session asks for", *result)
    for name in ("milliseconds", *ODD):
        table.add_row(name, *(f"{ratio[name]:.2f}" for ratio in result.values()))
    CONSOLE.print(table)


def main(
    target: Annotated[str, typer.Option(help="Folder of the target.")] = str(ROOT / "demo/models/target"),
    draft: Annotated[str, typer.Option(help="Folder of the draft model.")] = str(ROOT / "demo/models/draft"),
    vocabulary: Annotated[int, typer.Option(min=5000, help="Of the draws alone.")] = LARGE_VOCABULARY,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, of which the fastest counts.")] = 12,
    write: Write = None,
) -> None:
    """Measure what one session's parameters cost the others."""
    engines = {"target's step": load_engine(target, threads=1), "draft's step": load_engine(draft, threads=1)}
    result: dict[str, dict[str, float]] = {}
    with torch.inference_mode(), Progress(console=CONSOLE) as progress:
        for which, ordinary in ORDINARY.items():
            jobs = {
                "target's step": steps_of(engines["target's step"], ordinary),
                "draft's step": drafts_of(engines["draft's step"], ordinary),
                f"draws of {vocabulary:,} tokens": draws_of(vocabulary, ordinary, drafter=False),
                f"ranks of {vocabulary:,} tokens": draws_of(vocabulary, ordinary, drafter=True),
            }
            for name, each in jobs.items():
                task = progress.add_task(f"{name}, {which}", total=rounds)
                result[f"{name}, {which}"] = ratios(each, rounds, lambda task=task: progress.advance(task))  # type: ignore[misc]
    show(result)
    keep(write, {"ratios": result})


if __name__ == "__main__":
    typer.run(main)
