"""Asks what runs, in turn, and keeps what came back. Starts nothing itself."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from outrider_cli.bench.cells import (
    CHAINS,
    LOCK_STEP,
    PATHS,
    STREAMING,
    TUNED,
    Cell,
    asked,
    in_order,
    prompts_needed,
)
from outrider_cli.bench.client import Came, Reply, Request
from outrider_cli.bench.figures import Measured, Rejections, measured
from outrider_cli.bench.group import Seconds, ask_together
from outrider_cli.bench.peers import Generate, Peer, best_setting
from outrider_cli.bench.relay import Relay
from outrider_cli.bench.settings import Settings
from outrider_cli.bench.texts import Texts
from outrider_cli.bench.workloads import prompts

WARM_TOKENS = 8  # of each stream before a group is measured: both models have then read its prompt
SETTLING_TOKENS = 48  # after the line has changed, for those who measure it
SEED = 0  # of the order of the cells
TUNING_PROMPTS = 2
TUNING_TOKENS = 32


class Progress(Protocol):
    """Where a run tells how far it is."""

    def stage(self, what: str, steps: int) -> None: ...  # begins
    def step(self, what: str) -> None: ...  # of the stage begins


class Server(Protocol):
    """A way of serving, running."""

    async def ask(self, request: Request, came: Came | None = None) -> Reply: ...
    def cpu(self) -> Seconds: ...  # of its processes so far, by role; empty = not known


@dataclass(slots=True)
class Result:
    """What a run found."""

    runs: dict[Cell, list[Measured]] = field(default_factory=lambda: defaultdict(list))
    texts: Texts = field(default_factory=Texts)
    reading_seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    # by way: from sending a prompt that nobody has read yet to its first token, while nobody else asks
    tuned: dict[tuple[str, float], int] = field(default_factory=dict)  # by workload and temperature: best k
    carried_bytes: int = 0  # over the line between drafters and verifiers
    rejections: Rejections | None = None  # of the drafter with branches, in the whole run


class Bench:
    """The stages of a run."""

    def __init__(
        self, settings: Settings, servers: Mapping[str, Server], relay: Relay | None, progress: Progress
    ) -> None:
        """Asks nobody yet. `servers` stand by their way; `tune` adds transformers with its best settings."""
        self._settings = settings
        self._servers = servers
        self._relay = relay
        self._progress = progress
        needed = prompts_needed(settings.streams, settings.repetitions)
        self._prompts = {workload: prompts(workload, needed) for workload in settings.workloads}
        self._tuned: dict[tuple[str, float], Server] = {}
        self.result = Result()

    async def read(self, ways: Sequence[str]) -> None:
        """Lets every prompt be read by the services: what is measured later is decoding."""
        self._progress.stage("Reading the prompts", sum(map(len, self._prompts.values())))
        for workload, texts in self._prompts.items():
            for number, prompt in enumerate(texts):
                self._progress.step(workload)
                for way in ways:
                    reply = await self._servers[way].ask(Request(prompt, 1, 0.0, number))
                    self.result.reading_seconds[way].append(reply.arrivals[0][0] - reply.sent)

    async def tune(self, peer: Peer) -> None:
        """Finds transformers' best setting for each workload and temperature."""
        kinds = [
            (workload, degree)
            for workload in self._settings.workloads
            for degree in self._settings.temperatures
        ]
        self._progress.stage("Tuning transformers", len(kinds))
        for workload, degree in kinds:
            self._progress.step(f"{workload}, temperature {degree:g}")
            sample = self._prompts[workload][:TUNING_PROMPTS]
            tokens = min(TUNING_TOKENS, self._settings.max_tokens)
            best = await best_setting(peer, [Request(text, tokens, degree, 0) for text in sample])
            self.result.tuned[workload, degree] = best
            self._tuned[workload, degree] = Generate(peer, best)

    async def measure(self) -> None:
        """Measures all cells, in random order, as often as the settings say."""
        rng = random.Random(SEED)
        planned = self._settings.cells()
        self._progress.stage("Measuring", len(planned) * self._settings.repetitions)
        for repetition in range(self._settings.repetitions):
            for rtt_ms, part in in_order(planned, rng):
                await self._become(rtt_ms)
                for cell in part:
                    self._progress.step(f"{cell.way}: {cell.setting}")
                    await self._cell(cell, repetition)
        if self._relay is not None:
            self.result.carried_bytes = self._relay.carried_bytes

    async def _become(self, rtt_ms: float) -> None:
        """Makes the line so long, and lets those that measure it do so."""
        if self._relay is None:
            return
        self._relay.rtt_seconds = rtt_ms / 1e3
        prompt = self._prompts[self._settings.workloads[0]][0]
        for way in (LOCK_STEP, CHAINS, PATHS, STREAMING):
            if way in self._servers:
                await self._servers[way].ask(Request(prompt, SETTLING_TOKENS, 0.0, 0))

    async def _cell(self, cell: Cell, repetition: int) -> None:
        setting = cell.setting
        kind = (setting.workload, setting.temperature)
        server = self._tuned[kind] if cell.way == TUNED else self._servers[cell.way]
        texts = self._prompts[setting.workload]
        numbers = asked(setting.streams, repetition, len(texts))
        requests = [
            Request(texts[number], self._settings.max_tokens, setting.temperature, number)
            for number in numbers
        ]

        def cpu() -> Seconds:
            return {**server.cpu(), "client": time.process_time()}

        warm = min(WARM_TOKENS, self._settings.max_tokens)
        await ask_together(server, [replace(request, max_tokens=warm) for request in requests], cpu)
        answers = await ask_together(server, requests, cpu)
        self.result.runs[cell].append(measured(answers))
        for number, reply in zip(numbers, answers.replies, strict=True):
            self.result.texts.add(cell, number, reply.text)
