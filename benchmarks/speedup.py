"""Tokens a second with and without drafts, through the whole path: client, router, verifier, drafter.

    python benchmarks/speedup.py --target GROWN --draft demo/models/draft --write benchmarks/results/NAME.json

Starts two services, one with a drafter and one without (`--drafters 0`), both with the same target, and
asks them in turn, prompt by prompt, so that whatever else the machine does falls on both. Prompts are
held-out standard-library code (demo/heldout.py). Reports medians and quartiles over prompts, and whether
every answer of one was the same text as the other's.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from demo.heldout import heldout_prompts
from outrider.client import Client, Statistics

CONSOLE = Console()


@dataclass(frozen=True)
class Answer:
    text: str
    tokens: int
    seconds: float
    acceptance_rate: float | None
    mean_accepted_length: float | None


class Service:
    """`outrider serve` as a user starts it."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "outrider", "serve", "--port", "0", "--grpc-port", "0", *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.url = self._wait_until_ready()
        threading.Thread(target=self._drain, daemon=True).start()

    def _wait_until_ready(self) -> str:
        assert self._process.stdout is not None
        said = []
        for line in self._process.stdout:
            said.append(line)
            if found := re.search(r"is ready: (http://\S+)", line):
                return found[1]
        raise SystemExit("the service did not start:\n" + "".join(said[-20:]))

    def _drain(self) -> None:
        assert self._process.stdout is not None
        for _ in self._process.stdout:
            pass

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(20)


def ask(url: str, prompt: str, max_tokens: int, temperature: float) -> Answer:
    request = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": 1,
        "ignore_eos": True,
    }
    with Client(url) as client:
        pieces = list(client.stream("/v1/completions", request))
    told = pieces[-1]
    assert isinstance(told, Statistics)
    return Answer(
        "".join(str(piece) for piece in pieces[:-1]),
        told.completion_tokens,
        told.seconds,
        told.acceptance_rate,
        told.mean_accepted_length,
    )


def ask_together(url: str, prompts: list[str], max_tokens: int, temperature: float) -> list[Answer]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: ask(url, prompt, max_tokens, temperature), prompts))


def rate(answers: list[Answer]) -> float:
    """Tokens a second of a group that ran together."""
    return sum(answer.tokens for answer in answers) / max(answer.seconds for answer in answers)


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return {"median": middle, "lower_quartile": low, "upper_quartile": high}


def machine() -> str:
    """The processor's name, where the system tells, and the number of cores."""
    try:
        names = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        names = []
    name = names[0] if names else platform.machine()
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}"


def show(result: Mapping[str, object]) -> None:
    """The figures of a result as a table."""
    table = Table("figure", "median", "quartiles")
    for name, value in result.items():
        if isinstance(value, dict) and "median" in value:
            table.add_row(
                name,
                f"{value['median']:.2f}",
                f"{value['lower_quartile']:.2f} .. {value['upper_quartile']:.2f}",
            )
    CONSOLE.print(table)
    if "same_text" in result:
        CONSOLE.print(f"same text in every answer: {result['same_text']}")


def main(
    target: Annotated[str, typer.Option(help="Folder of the target.")] = "demo/models/target",
    draft: Annotated[str, typer.Option(help="Folder of the draft model.")] = "demo/models/draft",
    groups: Annotated[int, typer.Option(min=1, help="Groups of prompts asked of each service.")] = 8,
    streams: Annotated[int, typer.Option(min=1, help="Prompts in a group, asked at the same time.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 96,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 = greedy.")] = 0.0,
    num_speculative_tokens: Annotated[int, typer.Option(min=1, help="Most draft tokens in a step.")] = 8,
    write: Annotated[Path | None, typer.Option(help="File to keep the result in, as JSON.")] = None,
) -> None:
    """Compare the service with a drafter to the service without."""
    k = ["--num-speculative-tokens", str(num_speculative_tokens), "--threads", "1"]
    drafted = Service("--target", target, "--draft", draft, *k)
    plain = Service("--target", target, "--drafters", "0", *k)
    try:
        prompts = heldout_prompts((groups + 1) * streams)
        for service in (drafted, plain):  # warm both
            ask_together(service.url, prompts[:streams], max_tokens, temperature)
        pairs = []
        for group in track(range(1, groups + 1), "Asking both in turn", console=CONSOLE):
            asked = prompts[group * streams : (group + 1) * streams]
            order = [drafted, plain] if group % 2 else [plain, drafted]
            answers = {
                service.url: ask_together(service.url, asked, max_tokens, temperature) for service in order
            }
            pairs.append((answers[drafted.url], answers[plain.url]))
    finally:
        drafted.stop()
        plain.stop()
    with_drafts, without = [rate(pair[0]) for pair in pairs], [rate(pair[1]) for pair in pairs]
    answered = [answer for pair in pairs for answer in pair[0]]
    result = {
        "command": "python " + " ".join(sys.argv),
        "machine": machine(),
        "versions": {name: version(name) for name in ("torch", "transformers", "grpcio")},
        "streams": streams,
        "tokens_per_second_with_drafts": spread(with_drafts),
        "tokens_per_second_plain": spread(without),
        "speedup": spread([a / b for a, b in zip(with_drafts, without, strict=True)]),
        "draft_acceptance_rate": spread([answer.acceptance_rate or 0.0 for answer in answered]),
        "mean_acceptance_length": spread([answer.mean_accepted_length or 1.0 for answer in answered]),
        "same_text": all(a.text == b.text for pair in pairs for a, b in zip(*pair, strict=True)),
        "groups": [{"with_drafts": a, "plain": b} for a, b in zip(with_drafts, without, strict=True)],
    }
    show(result)
    if write is not None:
        write.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
