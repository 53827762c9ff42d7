"""Measures what one session's parameters cost those that share its steps.

    python benchmarks/company.py --target TARGET --write benchmarks/results/company.json

Steps of sixteen sessions, each with its last token and four drafts, of a target, the demo's if none is
named; and steps of a draft model. All sessions ask for the same, but one, which asks for something else.
Told is the processor time of such a step, with that of the threads which follow a grammar, over that of a
step in which it asks for what the others do. All its rows count, as if every draft were right. Some
parameters cost more with a large vocabulary, so draws are measured there, too, of random logits: alone, and
with the last layer that gives as many logits in the smallest model of such a vocabulary, which is the least
that a step can be. Of several rounds the fastest counts. `n` is no case of its own: each answer is a
session. What is measured is printed at once, so that a run that is ended has said what it found.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from llguidance import LLMatcher
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.keep import Write, keep
from benchmarks.step import works
from outrider.engine.engine import Engine
from outrider.engine.loading import load_engine, load_tokenizer
from outrider.grammar import Allowed, Grammars
from outrider.sampling.logprobs import Scores
from outrider.sampling.params import MAX_BIASES, SamplingParams
from outrider.sampling.sampler import Row, TokenCounts, draw, rank
from outrider.wire.logprobs import MAX_TOP_LOGPROBS

CONSOLE = Console()
ROOT = Path(__file__).resolve().parent.parent
SESSIONS = 16
DRAFTS = 4
LENGTH = 256  # of the sessions
LARGE_VOCABULARY = 151_936
HIDDEN = 896  # of the smallest model with it: Qwen2.5-0.5B
KV_BYTES = 64 * 2**20  # of each model here
DISTINCT = 4000  # tokens of the text before, where it counts
TEXT = '"return the first of them'  # that both grammars let come
LOGPROBS, GRAMMAR = "logprobs", "grammar"  # what is asked for beside parameters of sampling
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
    "logprobs": {LOGPROBS: 0},
    f"logprobs of {MAX_TOP_LOGPROBS}": {LOGPROBS: MAX_TOP_LOGPROBS},
    "a JSON text": {GRAMMAR: LLMatcher.grammar_from_json_schema({"type": "string"})},
    "a regex": {GRAMMAR: LLMatcher.grammar_from_regex(r'"?([a-z]{1,12} ?){1,200}')},
    "all of them": {
        LOGPROBS: MAX_TOP_LOGPROBS,
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
Run = Callable[[Sequence[Row], Scores | None], object]
Masks = Callable[[str, int], Callable[[], Sequence[Allowed]]]
"""From a grammar and a number of drafts to what begins to find the masks of a step's rows."""


def company(ordinary: SamplingParams, odd: Mapping[str, Any], drafts: int) -> list[Row]:
    """Returns the rows of a step in which the first session asks for something else."""
    history = TokenCounts(range(DISTINCT), range(DISTINCT // 2))
    sampling = {name: value for name, value in odd.items() if name not in (LOGPROBS, GRAMMAR)}
    rows = []
    for session in range(SESSIONS):
        params = replace(ordinary, seed=session, **(sampling if session == 0 else {}))
        drafted = list(range(3, 3 + drafts))
        rows += [
            Row(params, LENGTH + depth, history if params.penalized else None, drafted[:depth])
            for depth in range(1 + drafts)
        ]
    return rows


def asking(odd: Mapping[str, Any], ordinary: SamplingParams, drafts: int, masks: Masks, run: Run) -> Timed:
    """Returns a step of such a company, with what is begun anew for each step."""
    rows, own = company(ordinary, odd, drafts), 1 + drafts
    allowed = masks(odd[GRAMMAR], drafts) if GRAMMAR in odd else None
    counts = [odd.get(LOGPROBS)] * own + [None] * (len(rows) - own)

    def step() -> object:
        ruled = rows
        if allowed is not None:
            found = allowed()
            ruled = [row._replace(allowed=mask) for row, mask in zip(rows[:own], found, strict=True)] + rows[
                own:
            ]
        return run(ruled, Scores(counts) if LOGPROBS in odd else None)

    return step


def followed(model: str) -> Masks:
    """Returns what follows grammars with a model's tokenizer: a text of which every draft may come."""
    files = load_tokenizer(model)
    text = Tokenizer.from_str(files.json).encode(TEXT, add_special_tokens=False).ids
    grammars = Grammars(files.json, [0])

    def masks(grammar: str, drafts: int) -> Callable[[], Sequence[Allowed]]:
        place, path = grammars.place(grammar, (), lambda: None), text[:drafts]
        while not place.ready:
            time.sleep(0.001)
        fit = place.fits(path) or 0  # all of them, with a tokenizer that knows these words

        def found() -> list[Allowed]:
            ruled = place.masks(path[:fit])
            return ruled + ruled[-1:] * (drafts - fit)

        return found

    return masks


def every_other(vocab_size: int) -> Masks:
    """Returns masks that let every other token come, whatever the grammar: a mask's share of a draw."""
    mask = np.full(-(-vocab_size // 8), 0x55, np.uint8)
    return lambda grammar, drafts: lambda: [lambda: mask] * (1 + drafts)


def fastest(jobs: Mapping[str, Timed], rounds: int) -> dict[str, float]:
    """Returns each job's seconds of a processor: of several rounds the fewest."""
    seconds = dict.fromkeys(jobs, float("inf"))
    order, rng = list(jobs), random.Random(1)
    for _ in range(rounds):
        rng.shuffle(order)
        for name in order:
            began = time.process_time()
            jobs[name]()
            seconds[name] = min(seconds[name], time.process_time() - began)
    return seconds


def ratios(seconds: Mapping[str, float], besides: float = 0.0) -> dict[str, float]:
    """Returns them over the first, with what each of them takes besides."""
    first = next(iter(seconds.values())) + besides
    return {"milliseconds": first * 1e3} | {
        name: (value + besides) / first for name, value in seconds.items()
    }


def steps_of(engine: Engine, ordinary: SamplingParams, masks: Masks) -> dict[str, Timed]:
    """Returns the verifier's steps, by what one of the sessions asks for."""
    batch = works(engine, SESSIONS, LENGTH, 1 + DRAFTS)

    def run(rows: Sequence[Row], scores: Scores | None) -> object:
        return engine.choose(engine.prepare(batch), rows, None, scores)

    return {name: asking(odd, ordinary, DRAFTS, masks, run) for name, odd in ODD.items()}


def drafts_of(engine: Engine, ordinary: SamplingParams, masks: Masks) -> dict[str, Timed]:
    """Returns the drafter's steps."""
    batch = works(engine, SESSIONS, LENGTH, 1)

    def run(rows: Sequence[Row], scores: Scores | None) -> object:
        return engine.rank(engine.prepare(batch), rows, 3)

    return {name: asking(odd, ordinary, 0, masks, run) for name, odd in ODD.items()}


def draws_of(vocab_size: int, ordinary: SamplingParams, drafter: bool) -> dict[str, Timed]:
    """Returns draws alone, without a model."""
    drafts = 0 if drafter else DRAFTS
    logits = torch.randn(SESSIONS * (1 + drafts), vocab_size, generator=torch.Generator().manual_seed(1)) * 3

    def run(rows: Sequence[Row], scores: Scores | None) -> object:
        if drafter:
            return rank(logits, rows, 3)
        chosen: list[int] = draw(logits, rows).tolist()
        if scores is not None:
            scores.find(logits, rows, chosen)
        return chosen

    masks = every_other(vocab_size)
    return {name: asking(odd, ordinary, drafts, masks, run) for name, odd in ODD.items()}


def last_layer(vocab_size: int, rows: int) -> dict[str, Timed]:
    """Returns the product that gives logits of so many rows."""
    weight, hidden = torch.rand(vocab_size, HIDDEN) - 0.5, torch.rand(rows, HIDDEN)
    return {"last layer": lambda: torch.nn.functional.linear(hidden, weight)}


def show(result: Mapping[str, Mapping[str, float]]) -> None:
    """Prints the ratios as tables: what is asked for in each line, what is measured in each column."""
    for which in ORDINARY:
        columns = {name.removesuffix(f", {which}"): of for name, of in result.items() if name.endswith(which)}
        table = Table(f"one session asks for; others: {which}", *columns)
        for name in ("milliseconds", *ODD):
            table.add_row(name, *(f"{ratio[name]:.2f}" for ratio in columns.values()))
        CONSOLE.print(table)


def main(
    target: Annotated[str, typer.Option(help="Folder of the target.")] = str(ROOT / "demo/models/target"),
    draft: Annotated[str, typer.Option(help="Folder of the draft model.")] = str(ROOT / "demo/models/draft"),
    vocabulary: Annotated[int, typer.Option(min=5000, help="Of the draws alone.")] = LARGE_VOCABULARY,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, of which the fastest counts.")] = 12,
    write: Write = None,
) -> None:
    """Measure what one session's parameters cost the others."""
    engine, drafter = (load_engine(model, threads=1, kv_memory_bytes=KV_BYTES) for model in (target, draft))
    result: dict[str, dict[str, float]] = {}

    def measured(name: str, seconds: Mapping[str, float], besides: float = 0.0) -> None:
        ratio = result[name] = ratios(seconds, besides)
        dearest = max(ODD, key=ratio.__getitem__)
        typer.echo(f"{name}: {ratio['milliseconds']:.2f} ms, at most {ratio[dearest]:.2f} times: {dearest}")

    def draws(name: str, ordinary: str, drafts: int) -> None:
        seconds = fastest(draws_of(vocabulary, ORDINARY[ordinary], drafter=not drafts), rounds)
        layer = fastest(last_layer(vocabulary, SESSIONS * (1 + drafts)), rounds)
        measured(f"{name} of {vocabulary:,} tokens, {ordinary}", seconds)
        measured(f"the same with the last layer, {name}, {ordinary}", seconds, layer["last layer"])

    with torch.inference_mode():
        for which, ordinary in ORDINARY.items():
            measured(f"target's step, {which}", fastest(steps_of(engine, ordinary, followed(target)), rounds))
            measured(f"draft's step, {which}", fastest(drafts_of(drafter, ordinary, followed(draft)), rounds))
            draws("draws", which, DRAFTS)
            draws("ranks", which, 0)
    show(result)
    keep(write, {"ratios": result})


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("company.py was told to end (SIGTERM): nothing is kept.")
    )
    typer.run(main)
