"""Measures one stream of `outrider serve` beside transformers' generate and llama.cpp's server.

    python benchmarks/peers.py --target demo/grown --llama-server llama.cpp/build/bin/llama-server \
        --gguf target-f32.gguf --draft-gguf draft-f32.gguf --gguf-8-bits target-q8_0.gguf \
        --draft-gguf-8-bits draft-q8_0.gguf --write benchmarks/results/peers-grown.json

All serve the same checkpoints on all cores of this machine, or by one thread where the name says so, one
server at a time, as a user would start it: plain and with the draft model, in float32 and in 8 bits. A round
starts each of them once, the next round in the other order, and asks each prompt at each temperature, after a
warm-up. A rate is that of an answer's tokens after the first text. Then prompts of --prompt-words follow,
each of which nobody has read: how long the first token takes. llama.cpp and transformers are tried with
several numbers of draft tokens; all are told. Without --llama-server, llama.cpp is left out. Its files are
made by its convert_hf_to_gguf.py. With --draft "" the guesses are looked up, and the others run plain.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.keep import Draft, Target, Write, keep
from outrider.errors import OutriderError, StartupError
from outrider.options.model_id import checkpoint_name
from outrider_cli.bench.client import Request, ServerClient
from outrider_cli.bench.figures import measured
from outrider_cli.bench.group import Answers, Server
from outrider_cli.bench.peers import Generate, peer
from outrider_cli.bench.placing import Cores
from outrider_cli.bench.services import EXTRAS
from outrider_cli.bench.workloads import prompts, prose
from outrider_cli.children import Models

CONSOLE = Console()
LLAMAS_EXTRAS = {  # the whole distribution, and no end before the last token
    "ignore_eos": True,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "stream_options": {"include_usage": True},
}
DRAFTED = (5, 8, 16)  # tokens at a time, by llama.cpp and transformers
READY_SECONDS = 300.0
STOP_SECONDS = 20.0
WARM_UP = 8  # tokens

Serving = Callable[[], AbstractAsyncContextManager[Server]]
File = Path | None


@dataclass(frozen=True, slots=True)
class Files:
    """What is served: folders for Outrider and transformers, files for llama.cpp."""

    target: str
    draft: str
    llama_server: Path | None = None
    gguf: Path | None = None
    draft_gguf: Path | None = None
    gguf_8_bits: Path | None = None
    draft_gguf_8_bits: Path | None = None

    @property
    def name(self) -> str:
        """Returns the model's name at Outrider; llama.cpp takes any."""
        return checkpoint_name(self.target)


def ways(files: Files) -> dict[str, Serving]:
    """Returns all ways of serving, by name."""
    return {**_ours(files), **_transformers(files), **_llamas(files)}


def _ours(files: Files) -> dict[str, Serving]:
    def serve(*options: str) -> Serving:
        guesses = ("--draft", files.draft) if files.draft else ("--propose", "suffix")
        draft = () if "--drafters" in options else guesses
        words = (sys.executable, "-m", "outrider_cli", "serve", "--target", files.target, *draft, *options)
        return lambda: served(
            files.name, lambda port: (*words, "--port", str(port), "--grpc-port", "0"), EXTRAS
        )

    int8, int4 = (("--quantization", kind) for kind in ("int8", "int4"))
    return {
        "outrider, plain, 1 thread": serve("--drafters", "0", "--threads", "1"),
        "outrider, plain": serve("--drafters", "0"),
        "outrider": serve(),
        "outrider, 8 bits, plain": serve("--drafters", "0", *int8),
        "outrider, 8 bits": serve(*int8),
        "outrider, 4 bits, plain": serve("--drafters", "0", *int4),
        "outrider, 4 bits": serve(*int4),
    }


def _transformers(files: Files) -> dict[str, Serving]:
    models = Models(files.target, files.draft or None, files.name)

    def generate(assistant: int | None, threads: int) -> Serving:
        @asynccontextmanager
        async def serving() -> AsyncIterator[Server]:
            async with peer(models, Cores(tuple(range(threads)), (0,), pinned=False)) as running:
                yield Generate(running, assistant)

        return serving

    cores = os.cpu_count() or 1
    return {
        "transformers, plain, 1 thread": generate(None, 1),
        "transformers, plain": generate(None, cores),
        **{f"transformers, {k} at a time": generate(k, cores) for k in DRAFTED if files.draft},
    }


def _llamas(files: Files) -> dict[str, Serving]:
    def serve(target: Path, *options: str) -> Serving:
        size = ("--ctx-size", "4096", "--parallel", "1")
        command = (str(files.llama_server), "--model", str(target), *size, *options)
        return lambda: served(files.name, lambda port: (*command, "--port", str(port)), LLAMAS_EXTRAS)

    found: dict[str, Serving] = {}
    for bits, target, draft in (
        ("", files.gguf, files.draft_gguf),
        (", 8 bits", files.gguf_8_bits, files.draft_gguf_8_bits),
    ):
        if files.llama_server is None or target is None:
            continue
        threads = ("--threads", str(os.cpu_count() or 1))
        found[f"llama.cpp{bits}, plain, 1 thread"] = serve(target, "--threads", "1")
        found[f"llama.cpp{bits}, plain"] = serve(target, *threads)
        for k in DRAFTED if draft is not None else ():
            drafting = ("--model-draft", str(draft), "--spec-type", "draft-simple")
            found[f"llama.cpp{bits}, {k} at a time"] = serve(
                target, *threads, *drafting, "--spec-draft-n-max", str(k)
            )
    return found


@asynccontextmanager
async def served(
    name: str, command: Callable[[int], Sequence[str]], extras: Mapping[str, Any]
) -> AsyncIterator[Server]:
    """Starts a server of OpenAI's API on a free port, and ends it. Raises StartupError if it does not
    answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    words = command(port)
    process = await asyncio.create_subprocess_exec(
        *words,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    client = ServerClient(f"http://127.0.0.1:{port}", name, extras)
    try:
        await _answering(client, process, words)
        yield _Answered(client)
    finally:
        await client.close()
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            try:
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
            except TimeoutError:
                process.kill()
                await process.wait()


@dataclass(frozen=True, slots=True)
class _Answered:
    client: ServerClient

    async def ask(self, request: Request, came: Any = None) -> Any:
        await self.client.close()  # llama.cpp ends a connection after a streamed answer, and does not say so
        return await self.client.ask(request, came)


async def _answering(client: ServerClient, process: Any, words: Sequence[str]) -> None:
    until = time.monotonic() + READY_SECONDS
    while True:
        try:
            await client.close()
            await client.ask(Request("a", 1, 0.0, 0))
            return
        except (OutriderError, OSError) as error:
            if process.returncode is not None or time.monotonic() > until:
                raise StartupError(f"{' '.join(words)} does not answer: {error}") from None
        await asyncio.sleep(0.5)


def long_prompts(words: int, count: int, seed: int) -> list[str]:
    """Returns different prompts of so many words, no two of which begin alike; none, if of no words."""
    rng = random.Random(seed)
    known = " ".join(map(str, islice(prose(), 200))).split()
    return [" ".join(rng.choices(known, k=words)) for _ in range(count)] if words else []


@dataclass(slots=True)
class Found:
    """What was measured of one way."""

    rates: dict[float, list[float]]  # tokens a second, by temperature
    first_seconds: list[float] = field(default_factory=list)  # to the first token of a long prompt


async def measure(
    serving: Mapping[str, Serving],
    asked: Sequence[str],
    temperatures: Sequence[float],
    max_tokens: int,
    prompt_words: int,
    rounds: int,
    tick: Callable[[str], None],
    came: Callable[[str, float, float], None],
) -> dict[str, Found]:
    """Returns what was found, by way. `came` is told of each rate as it comes."""
    found = {name: Found({temperature: [] for temperature in temperatures}) for name in serving}
    for number in range(rounds):
        for name in list(serving) if number % 2 == 0 else reversed(list(serving)):
            tick(name)
            async with serving[name]() as server:
                for seed, prompt in enumerate(asked):
                    await server.ask(Request(prompt, WARM_UP, 0.0, 0))  # a prompt read before is cached
                    for temperature in temperatures:
                        reply = await server.ask(Request(prompt, max_tokens, temperature, seed))
                        rate = measured(Answers([reply])).rate
                        found[name].rates[temperature].append(rate)
                        came(name, temperature, rate)
                for prompt in long_prompts(prompt_words, len(asked), number):
                    reply = await server.ask(Request(prompt, 2, 0.0, 0))
                    found[name].first_seconds.append(reply.arrivals[0][0] - reply.sent)
    return found


def show(found: Mapping[str, Found]) -> None:
    temperatures = list(next(iter(found.values())).rates)
    shown = (f"tokens/s at temperature {temperature:g}" for temperature in temperatures)
    table = Table("", *shown, "s to the first token of a long prompt")
    for name, one in found.items():
        rows = [*one.rates.values(), one.first_seconds]
        table.add_row(name, *(_shown(spread(values)) if values else "" for values in rows))
    CONSOLE.print(table)


def _shown(one: Mapping[str, float]) -> str:
    return f"{one['median']:.3g} ({one['least']:.3g} to {one['most']:.3g})"


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def main(
    target: Target,
    draft: Draft = "demo/models/draft",
    llama_server: Annotated[File, typer.Option(exists=True, help="llama.cpp's llama-server.")] = None,
    gguf: Annotated[File, typer.Option(exists=True, help="The target in float32 for llama.cpp.")] = None,
    draft_gguf: Annotated[File, typer.Option(exists=True, help="The draft in float32 for it.")] = None,
    gguf_8_bits: Annotated[File, typer.Option(exists=True, help="The target in Q8_0.")] = None,
    draft_gguf_8_bits: Annotated[File, typer.Option(exists=True, help="The draft in Q8_0.")] = None,
    only: Annotated[str, typer.Option(help="Pattern of the names of the ways to measure.")] = "",
    workload: Annotated[str, typer.Option(help="What to ask for: code, prose or random.")] = "code",
    count: Annotated[int, typer.Option(min=1, help="Prompts.")] = 4,
    temperature: Annotated[str, typer.Option(help="Temperatures, with commas between them.")] = "0,0.8",
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 128,
    prompt_words: Annotated[int, typer.Option(min=0, help="Of the long prompts; 0 = there are none.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds.")] = 3,
    write: Write = None,
) -> None:
    """Measure one stream of Outrider, transformers and llama.cpp in turn."""
    files = Files(target, draft, llama_server, gguf, draft_gguf, gguf_8_bits, draft_gguf_8_bits)
    serving = {name: way for name, way in ways(files).items() if re.search(only, name)}
    if not serving:
        raise typer.BadParameter(f"{only!r} is in no name of {', '.join(ways(files))}", param_hint="--only")
    temperatures = [float(each) for each in temperature.split(",")]
    asked = [str(prompt) for prompt in prompts(workload, count)]
    with Progress(console=CONSOLE) as progress:
        task = progress.add_task("Starting", total=rounds * len(serving))
        found = asyncio.run(
            measure(
                serving,
                asked,
                temperatures,
                max_tokens,
                prompt_words,
                rounds,
                lambda name: progress.update(task, advance=1, description=name),
                lambda name, temperature, rate: CONSOLE.print(f"{name} at {temperature:g}: {rate:.1f}"),
            )
        )
    show(found)
    rates = {
        name: {f"{temperature:g}": spread(of) for temperature, of in one.rates.items()}
        for name, one in found.items()
    }
    first = {name: spread(one.first_seconds) for name, one in found.items() if one.first_seconds}
    result: dict[str, object] = {"tokens_per_second": rates, "first_token_seconds": first}
    keep(
        write,
        {**result, "answers": rounds * len(asked), "max_tokens": max_tokens, "prompt_words": prompt_words},
    )


if __name__ == "__main__":
    typer.run(main)
