"""`outrider bench`: how fast text comes, beside plain decoding, lock-step and transformers' generate."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demo import pair
from drafter.config import DrafterConfig
from outrider.options.engine import EngineOptions
from outrider.options.option import build, option, same, wrong
from outrider_cli.commands import command
from outrider_cli.reporting import reported
from outrider_cli.roles import API_KEYS, STORE
from verifier.config import VerifierConfig

if TYPE_CHECKING:
    from outrider_cli.bench.settings import Settings

RESULT = "result.json"
WIDTH = 120
EACH = 10  # repetitions of one stream that ask each conversation of the suite once


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What `bench` is told, before it is read."""

    target: str | None = option(
        None,
        "Folder, GGUF file or hub id of the target.",
        shown="the built-in pair's; with --suite what serve serves",
    )
    draft: str | None = option(
        None, "Folder, GGUF file or hub id of the draft model.", shown="the built-in pair's"
    )
    propose: str | None = same(DrafterConfig, "propose")
    speculator: str | None = same(VerifierConfig, "speculator")
    suite: bool = option(
        False, "Ask ten conversations of eight kinds, once each, in the model's chat template."
    )
    workload: str | None = option(
        None,
        "What to ask for, of: code, prose, random.",
        metavar="LIST",
        shown="all; with --suite its kinds",
    )
    temperature: str = option("0,0.8", "Sampling temperatures; 0 = greedy.", metavar="LIST")
    streams: str = option("1,16", "Requests at the same time.", metavar="LIST")
    rtt: str | None = option(
        None,
        "Round trips between drafter and verifier, in ms.",
        metavar="LIST",
        shown="0,20; with --url none",
    )
    repetitions: int | None = option(
        None, "How often everything is measured.", least=1, shown="3; with --suite 10"
    )
    max_tokens: int = option(96, "Tokens of each answer.", least=2)
    peers: bool = option(True, "Measure transformers' generate too.", negated=True)
    lock_step: bool = option(True, "Measure drafts that wait for each verdict too.", negated=True)
    chains: bool = option(False, "Measure streaming drafts without branches too.")
    paths: bool = option(False, "Measure drafts of which a step verifies one path too.")
    kv_memory: str = same(EngineOptions, "kv_memory", "2GiB")
    quantization: str | None = same(EngineOptions, "quantization")
    cores: str | None = option(
        None,
        "CPU cores of each model, such as 0/1 or 0,1/2,3; any = wherever the system puts them. "
        "transformers gets all of them.",
        metavar="TARGET/DRAFT",
        shown="half of the machine each; all for the target, if guesses are looked up",
    )
    price_per_hour: float | None = option(
        None, "Price of the machine, to tell what a million tokens costs.", least=0, shown="none"
    )
    url: str | None = option(
        None, "Measure this OpenAI-compatible server instead; it is not started.", shown="none"
    )
    model: str | None = option(None, "With --url: the model's name there.", shown="the first it lists")
    write: Path | None = option(
        None, "Folder for the result as JSON and pictures.", metavar="DIR", shown="none"
    )


def _bench_command(**given: Any) -> None:
    for name in (STORE, API_KEYS):  # of other routers: these processes keep to themselves
        os.environ.pop(name, None)
    with reported("bench"):
        told = build(BenchOptions, given)
        measure(settings_of(told), told.write)


def settings_of(told: BenchOptions) -> Settings:
    """Returns the settings. Raises StartupError for the first value that cannot be."""
    from outrider_cli.bench.settings import Settings, numbers, parse_cores, words
    from outrider_cli.bench.suite import suite
    from outrider_cli.serve import choose_models, quantization

    available = (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )
    workloads = words(told.workload or (",".join(suite()) if told.suite else "code,prose,random"))
    for one in workloads:
        if told.suite and one not in suite():
            raise wrong("workload", f"must be of the suite's, {', '.join(suite())}, not {one}")
    target = told.target or (None if told.suite or told.draft else pair.NAME)
    models = None
    if told.url is not None:
        for name in ("target", "draft", "propose", "speculator", "quantization", "cores"):
            if getattr(told, name) is not None:
                raise wrong(name, "is of what a run starts itself: leave it out, or --url")
    else:
        if told.model is not None:
            raise wrong("model", "is the name at a server that --url says: leave it out")
        models = choose_models(target, told.draft, 1, told.propose, told.speculator, "bench")
    engine = EngineOptions(kv_memory=told.kv_memory, quantization=told.quantization)
    if models is not None:
        engine = replace(engine, quantization=quantization(engine, models))
    return Settings(
        workloads=workloads,
        temperatures=numbers("--temperature", told.temperature, float, 0),
        streams=tuple(int(count) for count in numbers("--streams", told.streams, int, 1)),
        rtts_ms=numbers("--rtt", told.rtt or ("0" if told.url else "0,20"), float, 0),
        repetitions=told.repetitions or (EACH if told.suite else 3),
        max_tokens=told.max_tokens,
        models=models,
        url=told.url,
        model=told.model,
        lock_step=told.lock_step,
        chains=told.chains,
        paths=told.paths,
        peers=told.peers,
        price_per_hour=told.price_per_hour,
        engine=engine,
        cores=parse_cores(told.cores, available, divided=models is None or models.draft is not None),
    )


bench = command(
    _bench_command,
    "bench",
    "Measure how fast text comes: with drafts, without, in lock-step, and from transformers.",
    BenchOptions,
)


def measure(settings: Settings, write: Path | None) -> None:
    """Measures all cells, shows what it found, and keeps it in the folder."""
    import asyncio
    import selectors

    from rich.console import Console

    from outrider_cli.bench import plots, report
    from outrider_cli.bench.provenance import provenance
    from outrider_cli.bench.run import run
    from outrider_cli.display import BenchDisplay

    if write is not None:
        plots.check_installed()
        write.mkdir(parents=True, exist_ok=True)
    console = Console()
    if not console.is_terminal:  # nobody's window: as wide as the tables
        console = Console(width=WIDTH)
    load_before = os.getloadavg()[0]  # of the last minute: what else the machine did
    # select() waits to the microsecond; epoll rounds up to milliseconds, and the line would be longer.
    with (
        BenchDisplay(console) as display,
        asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner,
    ):
        result = runner.run(run(settings, display))
    for table in report.cells_tables(settings, result):
        console.print(table)
    console.print(report.LEGEND, highlight=False)
    for sentence in report.sentences(settings, result):
        console.print(sentence, highlight=False)
    if write is not None:
        about: report.Json = {
            "command": "outrider " + " ".join(sys.argv[1:]),
            **provenance(),
            "load_before": load_before,
        }
        kept = json.dumps(report.as_json(settings, result, about), indent=1)
        (write / RESULT).write_text(kept + "\n", encoding="utf-8")
        drawn = plots.draw(settings, result, write)
        console.print(
            f"kept in {write}: {', '.join([RESULT, *(path.name for path in drawn)])}", highlight=False
        )
