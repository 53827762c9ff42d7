"""Measures how long running streams stall while a long prompt is read beside them.

    python benchmarks/stall.py --target demo/grown --write benchmarks/results/stall-grown.json

The verifier's own stepper in this process, without drafts: some streams decode, then the prompt arrives, as
several prompts at once where the model's context is shorter. Once with chunks cut by what a step takes, once
with all of the size that --prefill-chunk allows. Told is the longest gap between two tokens of a stream until
the last of the prompts has its first token, over the median gap before; and, of the same time, the longest
step that read nothing, over that median: what the machine and the streams' own growth do to a step.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.keep import Target, Write, keep
from outrider.engine.engine import Engine
from outrider.engine.loading import load_engine
from outrider.options.engine import StepLimits
from outrider.sampling.params import SamplingParams
from outrider.wire.session import SessionParams
from verifier import meter
from verifier.price import StepTime
from verifier.profile import profile
from verifier.session import SessionSpec
from verifier.stepper import Stepper, StepReport

CONSOLE = Console()
QUIET_TOKENS = 24  # of each stream, before the prompt comes
GOAL = 2.5
UNLIMITED = 1e6  # times a step without a prompt


@dataclass
class Watch:
    """When the streams' tokens came, and when the prompts had their first."""

    streams: int
    came: dict[bytes, list[float]] = field(default_factory=dict)
    plain: list[float] = field(default_factory=list)  # seconds of the steps of all streams and nothing else

    def on_step(self, report: StepReport) -> None:
        if report.load.step_tokens == self.streams:
            self.plain.append(report.load.step_seconds)
        for running, _ in report.outcomes:
            self.came.setdefault(running.id, []).append(time.perf_counter())

    def gaps(self, streams: list[bytes], begin: float, end: float) -> list[float]:
        return [
            after - before
            for stream in streams
            for before, after in zip(self.came[stream], self.came[stream][1:], strict=False)
            if begin <= after and before <= end
        ]


async def stall(
    engine: Engine, step_time: StepTime | None, chunk: int, streams: int, prompt_tokens: int, seed: int
) -> dict[str, float]:
    """Returns the median gap before, the longest gap while the prompt is read, and how long that takes."""
    rng = random.Random(seed)
    watch = Watch(streams)
    stepper = Stepper(
        engine, StepLimits(512, chunk), watch.on_step, time.monotonic, lambda now, *_: now, step_time
    )

    def open_session(tokens: int, output: int) -> bytes:
        prompt = tuple(rng.randrange(1, engine.info.vocab_size) for _ in range(tokens))
        sampling = SamplingParams(temperature=0.0)
        spec = SessionSpec(
            rng.randbytes(16), SessionParams(prompt, sampling, output), (), engine.info.vocab_size, b""
        )
        stepper.open(spec, 0)
        return spec.session_id

    async def until(sessions: list[bytes], tokens: int) -> None:
        while any(len(watch.came.get(each, ())) < tokens for each in sessions):  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    steps = asyncio.create_task(stepper.run())
    long = engine.info.max_context - 16
    running = [open_session(16, long - 16) for _ in range(streams)]
    await until(running, 4)
    began = time.perf_counter()
    await until(running, 4 + QUIET_TOKENS)
    arrived = time.perf_counter()
    watch.plain.clear()
    parts = [min(long, prompt_tokens - start) for start in range(0, prompt_tokens, long)]
    prompts = [open_session(tokens, 1) for tokens in parts]
    await until(prompts, 1)
    over = time.perf_counter()
    for each in running:
        stepper.close(each)
    steps.cancel()
    await asyncio.gather(steps, return_exceptions=True)
    median = statistics.median(watch.gaps(running, began, arrived))
    return {
        "median_gap_milliseconds": median * 1e3,
        "longest_gap_milliseconds": max(watch.gaps(running, arrived, over)) * 1e3,
        "longest_over_median": max(watch.gaps(running, arrived, over)) / median,
        "longest_without_over_median": max(watch.plain, default=0.0) / median,
        "seconds_to_read": over - arrived,
    }


def main(
    target: Target = "demo/models/target",
    streams: Annotated[int, typer.Option(min=1, help="Streams that decode.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt that comes.")] = 4000,
    prefill_chunk: Annotated[int, typer.Option(min=1, help="Most tokens of prompts in a step.")] = 256,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the arithmetic.")] = 1,
    write: Write = None,
) -> None:
    """Measure how long a prompt stalls the streams beside it."""
    engine = load_engine(target, threads=threads)
    result: dict[str, object] = {
        "streams": streams,
        "prompt_tokens": prompt_tokens,
        "prefill_chunk": prefill_chunk,
    }
    table = Table("chunks", "median gap", "longest gap", "longest / median", "goal", "without", "read in")
    for name, step_time in (
        ("cut by what a step takes", profile(engine, time.perf_counter, lambda _: None)),
        (f"of {prefill_chunk}", None),
    ):
        if step_time is None:
            meter.LONGEST_STEP = UNLIMITED
        found = asyncio.run(stall(engine, step_time, prefill_chunk, streams, prompt_tokens, seed=1))
        result[name] = found
        table.add_row(
            name,
            f"{found['median_gap_milliseconds']:.0f} ms",
            f"{found['longest_gap_milliseconds']:.0f} ms",
            f"{found['longest_over_median']:.2f}",
            f"< {GOAL}",
            f"{found['longest_without_over_median']:.2f}",
            f"{found['seconds_to_read']:.1f} s",
        )
        engine.pool = type(engine.pool)(engine.pool.num_blocks, engine.pool.block_size)  # nothing is cached
    CONSOLE.print(table)
    keep(write, result)


if __name__ == "__main__":
    typer.run(main)
