"""The whole service on a GPU, as users run it: real processes, a trained draft, and a target that costs what
one of 8B does and computes what its small source computes."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from benchmarks.gpu_timing import Budget, Device
from benchmarks.soak import churn, resident_bytes
from demo.heldout import heldout_prompts
from demo.training.grow import choose_shape, grow, parse_count
from outrider.engine.loading import quiet_transformers
from outrider.options.engine import EngineOptions
from outrider.options.sessions import SessionOptions
from outrider_cli.bench.client import Request
from outrider_cli.bench.figures import measured
from outrider_cli.bench.group import ask_together
from outrider_cli.bench.placing import Cores
from outrider_cli.bench.services import Service, service
from outrider_cli.children import Models, Workers

PLAIN, DRAFTS, PATHS = "plain", "drafts", "paths"
SOURCES, ON_CPU, DIVIDED = "sources", "cpu-draft", "divided"
WAYS = {
    DRAFTS: "the draft model on the same GPU",
    PATHS: "the same, of which a step verifies one path, no tree",
    SOURCES: "the draft model and what looks up the text so far",
    ON_CPU: "the draft model on the CPU",
    DIVIDED: "as drafts, the target divided among two GPUs, if there are two",
}
TEMPERATURES = (0.0, 0.8)
WARM_TOKENS = 8  # of each stream before it is measured: its prompt is read then
SEED = 0


@dataclass(frozen=True)
class Served:
    """How large the target is, and how much is asked."""

    parameters: str
    streams: tuple[int, ...]
    max_tokens: int
    kv_memory: str  # of each worker with a model
    clients: tuple[int, int, int]  # of the churn: quick ones, slow ones, such that vanish


LARGE = Served("8B", (1, 8, 32, 128), 128, "50%", (48, 8, 8))
TINY = Served("12M", (1, 2), 32, "64MiB", (2, 1, 1))


@dataclass(frozen=True)
class Way:
    """What runs."""

    models: Models
    workers: Workers
    drafting: Workers | None = None  # how drafters are run, if not as verifiers


@dataclass
class Serving:
    """Asks one way after the other, and compares the texts with plain decoding's."""

    served: Served
    device: Device
    churn_seconds: float
    budget: Budget
    tell: Callable[[str], None]
    texts: dict[tuple[float, int], str] = field(default_factory=dict)  # by temperature and prompt
    rates: dict[tuple[float, int], float] = field(default_factory=dict)  # by temperature and streams

    async def measure(self, name: str, way: Way) -> dict[str, Any]:
        """Returns the way's figures. Raises StartupError if it does not come up."""
        self.tell(f"{name}: starting")
        sessions = SessionOptions(
            max_sessions=2 * max(self.served.streams) + sum(self.served.clients), seed=SEED
        )
        running = service(way.models, Cores(pinned=False), sessions, way.workers, drafting=way.drafting)
        async with running as one:
            found: dict[str, Any] = {"cells": [cell async for cell in self._cells(name, one)]}
            if name == DRAFTS and self.churn_seconds and self._may_churn():
                self.tell("streams that come, break off and go")
                found["churn"] = await self._churn(one)
        return found

    async def _cells(self, name: str, one: Service) -> Any:
        prompts = heldout_prompts(max(self.served.streams))
        for temperature in TEMPERATURES:
            for streams in self.served.streams:
                self.tell(f"{name}: {streams} streams at temperature {temperature:g}")
                asked = partial(self._requests, prompts[:streams], temperature)
                await ask_together(one, asked(WARM_TOKENS), one.cpu)
                answers = await ask_together(one, asked(self.served.max_tokens), one.cpu)
                figures = measured(answers)
                texts = {(temperature, number): reply.text for number, reply in enumerate(answers.replies)}
                if name == PLAIN:  # the first text stands: that of fewer streams
                    self.texts = texts | self.texts
                    self.rates[temperature, streams] = figures.rate
                same = [self.texts[key] == text for key, text in texts.items()]
                yield {
                    "temperature": temperature,
                    "streams": streams,
                    "tokens_per_second": figures.rate,
                    "over_plain": figures.rate / self.rates[temperature, streams],
                    "tokens_per_step": figures.tokens_per_arrival,
                    "acceptance": figures.accepted / figures.drafted if figures.drafted else None,
                    "first_token_seconds": median(figures.first_token_seconds),
                    "cpu_shares": figures.cpu_shares,
                    "texts_as_plain": sum(same) / len(same),
                }

    def _may_churn(self) -> bool:
        return self.budget.seconds_left >= self.churn_seconds or self.budget.allows("churn", 0.0)

    def _requests(self, prompts: Sequence[str], temperature: float, tokens: int) -> list[Request]:
        return [Request(prompt, tokens, temperature, number) for number, prompt in enumerate(prompts)]

    async def _churn(self, one: Service) -> dict[str, object]:
        meters: dict[str, Callable[[], float]]
        meters = {role: partial(resident_bytes, pid) for role, pid in one.pids.items()}
        if self.device.is_gpu:
            meters["gpu"] = self._used_bytes
        served = self.served
        return await churn(one, self.churn_seconds, served.clients, served.max_tokens, SEED, meters)

    def _used_bytes(self) -> int:
        """Returns what all processes together have taken of the device's memory."""
        free, total = torch.cuda.mem_get_info(self.device.torch)
        return total - free


def grown(source: Path, out: Path, parameters: str, device: Device) -> None:
    """Writes a checkpoint of so many parameters that computes the function of `source`, in the number format
    that the device runs it in."""
    quiet_transformers()
    with device.torch:
        small = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32).to(device.torch).eval()
        large = grow(small, choose_shape(small, parse_count(parameters)))
    large.to(torch.bfloat16 if device.is_gpu else torch.float32).save_pretrained(out)
    AutoTokenizer.from_pretrained(source).save_pretrained(out)


def ways(
    names: Sequence[str], target: str, draft: str, served: Served, device: Device
) -> Iterator[tuple[str, Way]]:
    """Yields plain decoding, then those that are named and can be had here."""
    engine = EngineOptions(device=str(device.torch), kv_memory=served.kv_memory)
    half = max(1, (os.cpu_count() or 1) // 2)
    workers = Workers(1, 1, engine)
    on_cpu = Workers(1, 1, EngineOptions(kv_memory="256MiB", threads=half))
    divided = EngineOptions(device=device.torch.type, kv_memory=served.kv_memory, tensor_parallel_size=2)
    pair, alone = Models(target, draft, "model"), Models(target, None, "model")
    known = {
        PLAIN: Way(alone, workers),
        DRAFTS: Way(pair, workers),
        PATHS: Way(pair, Workers(1, 1, engine, trees=False)),
        SOURCES: Way(Models(target, draft, "model", propose="suffix"), workers),
        ON_CPU: Way(pair, workers, on_cpu),
        DIVIDED: Way(pair, Workers(1, 1, divided), workers),
    }
    for name in (PLAIN, *names):
        if name != DIVIDED or not device.is_gpu or torch.cuda.device_count() >= 2:
            yield name, known[name]


def serve(
    names: Sequence[str],
    source: Path,
    draft: Path,
    served: Served,
    device: Device,
    churn_seconds: float,
    budget: Budget,
    tell: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Yields what is known so far, after each way."""
    serving = Serving(served, device, churn_seconds, budget, tell)
    found: dict[str, Any] = {"parameters": served.parameters, "max_tokens": served.max_tokens, "ways": {}}
    with tempfile.TemporaryDirectory() as folder:
        tell(f"growing the target to {served.parameters} parameters")
        grown(source, Path(folder), served.parameters, device)
        device.forget()
        for name, way in ways(names, folder, str(draft), served, device):
            if name != PLAIN and not budget.allows(name):
                continue
            found["ways"][name] = asyncio.run(serving.measure(name, way))
            yield found


def named(option: str, text: str, known: Mapping[str, str]) -> list[str]:
    """Returns the names in the text, with commas between. Raises SystemExit if one is unknown."""
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise SystemExit(f"{option} {name} is not one of {', '.join(known)}")
    return names
