"""Measures what a step costs on this machine's CPU, and what it has to cost at least.

    python benchmarks/step.py --target demo/grown --write benchmarks/results/step-grown.json

The floor of a step is memory: weights, and the keys and values of the context, are read once. So the
machine's bandwidth is measured in the same run, in turn with steps of n tokens and with the products of their
linear layers alone, and the share that one token reaches is told. Then what the host does around the forward
pass, in microseconds a session, part by part and together: they are to grow neither with the length of the
sessions nor with their number. Then the drafter's engine, and a prompt whose beginning is cached. Figures are
the fastest of several rounds: what disturbs a step makes it slower. Text and quality play no part here.
"""

from __future__ import annotations

import random
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.keep import ROOT, Draft, Target, Write, keep
from benchmarks.verifier_host import microseconds
from outrider.engine.engine import Engine, Work
from outrider.engine.kv_blocks import BlockTable
from outrider.engine.loading import load_engine, load_tokenizer
from outrider.engine.native_layers import BLOCK, LANES, NativeBlocksLinear
from outrider.engine.packed import PackedLinear
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row, draw
from outrider.wire.description import TokenizerFiles

CONSOLE = Console()
TOKENS = (1, 2, 3, 5, 9, 17, 33, 64)  # of a step
SESSIONS = (16, 64)  # that the host's part is measured with
LENGTHS = (64, 1024)  # of those sessions
DRAFTS = 4  # of each of them
ACCEPTANCE = 0.8  # of each of those, where tokens are drawn: the rows behind a rejected one are not
MESSAGES = 2  # in which those arrive at the verifier
DRAFTERS_SESSIONS = (1, 4, 16)
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, seed=1)
DRAWN = {"greedy": GREEDY, "temperature .8": SAMPLED}
HOST_GOAL = 80  # microseconds a session
BANDWIDTH_BYTES = 2**28  # read, or copied, at a time: far more than the caches hold
PREFIX = 1000  # tokens that two prompts share
REST = 24  # tokens after them
CHUNK = 256  # tokens of a prompt in a step

Timed = Callable[[], object]


def fastest(jobs: Mapping[str, Timed], rounds: int, tick: Callable[[], None]) -> dict[str, float]:
    """Returns the seconds of each job, in turn, so that whatever else the machine does falls on all of
    them."""
    seconds = dict.fromkeys(jobs, float("inf"))
    for _ in range(rounds):
        for name, job in jobs.items():
            began = time.perf_counter()
            job()
            seconds[name] = min(seconds[name], time.perf_counter() - began)
        tick()
    return seconds


def _bytes_of_a_weight(module: Any) -> float:
    """Returns how many a packed layer has for each weight, on average."""
    if isinstance(module, NativeBlocksLinear):
        return float(module.packed.shape[-1]) / (LANES * BLOCK)
    return float(module.packed.element_size())


def bytes_of_a_step(engine: Engine, context: int) -> tuple[int, int]:
    """Returns the bytes of (weights, keys and values) that a step of one token has to read."""
    embeddings = [module.weight for module in engine.model.modules() if isinstance(module, nn.Embedding)]
    looked_up = {id(weight) for weight in embeddings}
    weights = sum(
        parameter.numel() * parameter.element_size()
        for parameter in engine.model.parameters()
        if id(parameter) not in looked_up
    )
    weights += sum(
        round(module.in_features * module.out_features * _bytes_of_a_weight(module))
        for module in engine.model.modules()
        if hasattr(module, "packed")
    )
    layer = next(iter(engine.attention.layers.values()))
    width = (layer.width + layer.value_width) * layer.key_heads
    return weights, width * engine.attention.pools.of(0)[0].element_size() * len(
        engine.attention.layers
    ) * context


def works(engine: Engine, sessions: int, length: int, tokens: int, rows: int | None = None) -> list[Work]:
    """Returns sessions of that length in blocks of their own, as far as there are any."""
    each = -(-(length + tokens) // engine.pool.block_size)
    blocks = array("q", [index % engine.pool.num_blocks for index in range(sessions * each)])
    return [
        Work(blocks[index * each :][:each], length, [1] * tokens, tokens if rows is None else rows)
        for index in range(sessions)
    ]


def step_times(engine: Engine, context: int, rounds: int, tick: Callable[[], None]) -> dict[str, Any]:
    """Returns bandwidth, T(n), and what of it are the products of linear layers, in turn."""
    # By numpy, which asks for huge pages: the engine has its weights on them.
    source, sink = (torch.from_numpy(np.ones(BANDWIDTH_BYTES // 4, np.float32)) for _ in range(2))
    steps = {tokens: engine.prepare(works(engine, 1, context, tokens)) for tokens in TOKENS}
    jobs: dict[str, Timed] = {"read": lambda: source.sum(), "copy": lambda: sink.copy_(source)}
    for tokens, inputs in steps.items():
        jobs[str(tokens)] = lambda inputs=inputs: engine.forward(inputs)  # type: ignore[misc]
        jobs[f"products {tokens}"] = products(engine.model, tokens)
    seconds = fastest(jobs, rounds, tick)
    bandwidth = {
        "read": BANDWIDTH_BYTES / seconds["read"] / 1e9,
        "copy": 2 * BANDWIDTH_BYTES / seconds["copy"] / 1e9,
    }
    weights, kv = bytes_of_a_step(engine, context)
    reached, alone = (weights + kv) / seconds["1"] / 1e9, weights / seconds["products 1"] / 1e9
    return {
        "bandwidth_gb_per_second": bandwidth,
        "context": context,
        "weight_bytes": weights,
        "kv_bytes": kv,
        "step_gb_per_second": reached,
        "share_of_bandwidth": reached / max(bandwidth.values()),
        "products_share_of_bandwidth": alone / max(bandwidth.values()),
        "step_milliseconds": {str(tokens): seconds[str(tokens)] * 1e3 for tokens in TOKENS},
        "products_milliseconds": {str(tokens): seconds[f"products {tokens}"] * 1e3 for tokens in TOKENS},
        "t5_over_t1": seconds["5"] / seconds["1"],
        "t9_over_t1": seconds["9"] / seconds["1"],
    }


def products(model: nn.Module, tokens: int) -> Timed:
    """Times all linear layers of the model, one after the other, with so many rows each."""
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    rows = {width: torch.zeros(tokens, width) for width in {layer.in_features for layer in layers}}

    def run() -> None:
        for layer in layers:
            layer.forward(rows[layer.in_features])

    return run


def host_times(engine: Engine, rounds: int, tick: Callable[[], None]) -> dict[str, float]:
    """Returns the microseconds a session of what surrounds the forward pass, for a token and its drafts."""
    jobs: dict[str, Timed] = {}
    each: dict[str, int] = {}
    for sessions in SESSIONS:
        rows = sessions * (1 + DRAFTS)
        logits = torch.randn(rows, engine.info.vocab_size, generator=torch.Generator().manual_seed(1)) * 4
        for name, params in DRAWN.items():
            some = rows_of_a_step(logits, params)
            jobs[f"draw {name}, {sessions} sessions"] = lambda logits=logits, some=some: draw(  # type: ignore[misc]
                logits, some
            )
            each[f"draw {name}, {sessions} sessions"] = sessions
        for length in LENGTHS:
            batch = works(engine, sessions, length, 1 + DRAFTS)
            jobs[f"prepare, {sessions} sessions of {length}"] = lambda batch=batch: engine.prepare(batch)  # type: ignore[misc]
            each[f"prepare, {sessions} sessions of {length}"] = sessions
    seconds = fastest(jobs, rounds, tick)
    return {name: seconds[name] / each[name] * 1e6 for name in jobs}


def rows_of_a_step(logits: torch.Tensor, params: SamplingParams) -> list[Row]:
    """Returns the rows that a verifier asks for: of each session one for its token and one for each draft."""
    rows = [Row(params, position, None, ()) for position in range(len(logits))]
    tokens, rng = draw(logits, rows).tolist(), random.Random(1)
    return [
        row._replace(after=tokens[index - 1] if rng.random() < ACCEPTANCE else tokens[index - 1] + 1)
        if index % (1 + DRAFTS)
        else row
        for index, row in enumerate(rows)
    ]


def verifier_times(engine: Engine, tokenizer: TokenizerFiles, tick: Callable[[], None]) -> dict[str, float]:
    """Returns the microseconds a session of the verifier's own work: reading drafts, planning, reconciling,
    messages."""
    found = {}
    for sessions in SESSIONS:
        for length in LENGTHS:
            name = f"plan, reconcile, messages, {sessions} sessions of {length}"
            found[name] = microseconds(engine.info, tokenizer, sessions, length, DRAFTS, MESSAGES)
            tick()
    return found


def together(host: Mapping[str, float]) -> dict[str, float]:
    """Returns the whole of what surrounds the forward pass in a verifier's step, by how tokens are drawn."""
    return {
        f"{name}, {sessions} sessions of {length}": host[f"draw {name}, {sessions} sessions"]
        + host[f"prepare, {sessions} sessions of {length}"]
        + host[f"plan, reconcile, messages, {sessions} sessions of {length}"]
        for name in DRAWN
        for sessions in SESSIONS
        for length in LENGTHS
    }


def drafter_times(engine: Engine, context: int, rounds: int, tick: Callable[[], None]) -> dict[str, Any]:
    """Returns the milliseconds of a step in which each session drafts one token, with the draw."""
    row = Row(GREEDY, 1, None, ())
    jobs: dict[str, Timed] = {}
    for sessions in DRAFTERS_SESSIONS:
        batch = works(engine, sessions, context, 1)
        jobs[f"{sessions} sessions"] = lambda batch=batch: engine.choose(  # type: ignore[misc]
            engine.prepare(batch), [row] * len(batch)
        )
    seconds = fastest(jobs, rounds, tick)
    weights, kv = bytes_of_a_step(engine, context)
    return {
        "bytes": weights + kv,
        "step_milliseconds": {name: value * 1e3 for name, value in seconds.items()},
    }


def prefix_times(engine: Engine, rounds: int, tick: Callable[[], None]) -> dict[str, float]:
    """Returns the time to the first token of two prompts with the same beginning, one after the other, and
    how many tokens each of them ran."""
    rng = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(engine.info.vocab_size) for _ in range(count)]

    found = dict.fromkeys(("first_milliseconds", "second_milliseconds"), float("inf"))
    for _ in range(rounds):
        prefix = tokens(PREFIX)
        for which in ("first", "second"):
            began = time.perf_counter()
            ran = first_token(engine, prefix + tokens(REST))
            milliseconds = (time.perf_counter() - began) * 1e3
            found[f"{which}_milliseconds"] = min(found[f"{which}_milliseconds"], milliseconds)
            found[f"{which}_tokens_run"] = ran
        tick()
    return found


def first_token(engine: Engine, prompt: Sequence[int]) -> int:
    """Reads a prompt as a worker does, draws a token, and leaves the prompt cached; says how many ran."""
    table: BlockTable = engine.pool.open(prompt)
    cached = table.length
    while (start := table.length) < len(prompt):
        chunk = prompt[start : start + CHUNK]
        engine.pool.extend(table, len(chunk))
        last = table.length == len(prompt)
        rows = [Row(GREEDY, len(prompt), None, ())] if last else []
        engine.choose(engine.prepare([Work(table.blocks, start, chunk, len(rows))]), rows)
        engine.pool.seal(table, prompt)
    engine.pool.close(table)
    return len(prompt) - cached


def show(result: Mapping[str, Any]) -> None:
    """Prints the figures as a table, beside what the project aims at."""
    step, host = result["step"], result["host_microseconds_a_session"]
    table = Table("figure", "value", "goal")
    for name, value in step["bandwidth_gb_per_second"].items():
        table.add_row(f"bandwidth, {name}", f"{value:.1f} GB/s", "")
    table.add_row(
        "weights, and keys and values, over time of a 1-token step",
        f"{step['step_gb_per_second']:.1f} GB/s",
        "",
    )
    table.add_row("share of the bandwidth", f"{step['share_of_bandwidth']:.0%}", ">= 80%")
    table.add_row("that of its products alone", f"{step['products_share_of_bandwidth']:.0%}", "")
    for tokens, value in step["step_milliseconds"].items():
        of_it = step["products_milliseconds"][tokens]
        table.add_row(f"step of {tokens} tokens", f"{value:.1f} ms, products {of_it:.1f}", "")
    table.add_row("T(1 + 4) / T(1)", f"{step['t5_over_t1']:.2f}", "<= 1.25")
    table.add_row("T(1 + 8) / T(1)", f"{step['t9_over_t1']:.2f}", "<= 1.5")
    for name, value in host.items():
        table.add_row(f"host: {name}", f"{value:.1f} us a session", "")
    for name, value in result.get("host_together_microseconds_a_session", {}).items():
        table.add_row(f"host, together: {name}", f"{value:.1f} us a session", f"<= {HOST_GOAL}")
    if "drafter" in result:
        for name, value in result["drafter"]["step_milliseconds"].items():
            table.add_row(f"drafter, {name}", f"{value:.2f} ms", "")
    for which in ("first", "second"):
        milliseconds, ran = (result["prefix"][f"{which}_{what}"] for what in ("milliseconds", "tokens_run"))
        table.add_row(
            f"first token of the {which} prompt with a prefix of {PREFIX}",
            f"{milliseconds:.0f} ms, {ran} tokens run",
            "",
        )
    CONSOLE.print(table)


def main(
    target: Target = "demo/models/target",
    draft: Draft = str(ROOT / "demo/models/draft"),
    quantization: Annotated[str | None, typer.Option(help="Of the target: int8, or as it is.")] = None,
    draft_quantization: Annotated[str | None, typer.Option(help="int8, or as it is.")] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens in the cache before the step.")] = 256,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the arithmetic.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, of which the fastest counts.")] = 12,
    verifier: Annotated[
        bool, typer.Option(help="Measure the verifier's own part too, with peers in a process of their own.")
    ] = True,
    write: Write = None,
) -> None:
    """Measure what a step costs."""
    engine = load_engine(target, threads=threads, quantization=quantization)
    with torch.inference_mode(), Progress(console=CONSOLE) as progress:

        def ticking(what: str, times: int) -> Callable[[], None]:
            task = progress.add_task(what, total=times)
            return lambda: progress.advance(task)

        first_token(engine, [1] * context)  # shapes are known, memory is there
        result: dict[str, Any] = {
            "threads": threads,
            "target": {"parameters": engine.info.parameters, "bit_exact": engine.info.bit_exact},
            "step": step_times(engine, context, rounds, ticking("Steps", rounds)),
            "host_microseconds_a_session": host_times(engine, rounds, ticking("The host's part", rounds)),
            "prefix": prefix_times(engine, min(rounds, 3), ticking("A shared prefix", min(rounds, 3))),
        }
        if verifier:
            tick = ticking("The verifier's part", len(SESSIONS) * len(LENGTHS))
            result["host_microseconds_a_session"] |= verifier_times(engine, load_tokenizer(target), tick)
            result["host_together_microseconds_a_session"] = together(result["host_microseconds_a_session"])
        if draft:
            drafter = load_engine(draft, threads=threads, quantization=draft_quantization)
            first_token(drafter, [1] * context)
            result["drafter"] = drafter_times(
                drafter, context, 10 * rounds, ticking("The drafter", 10 * rounds)
            )
    show(result)
    keep(write, result)


if __name__ == "__main__":
    typer.run(main)
