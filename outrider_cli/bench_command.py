"""`outrider bench`: how fast text comes, beside plain decoding, lock-step and transformers' generate."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.defaults import NUM_SPECULATIVE_TOKENS
from outrider_cli import options
from outrider_cli.reporting import reported

if TYPE_CHECKING:
    from outrider_cli.bench.settings import Settings

RESULT = "result.json"
WIDTH = 110
PACKAGES = ("outrider", "torch", "transformers", "grpcio")


def bench(
    target: Annotated[
        str | None, typer.Option(help="Folder or hub id of the target.", show_default="the demo pair's")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="Folder or hub id of the draft model.", show_default="the demo pair's")
    ] = None,
    workload: Annotated[
        str, typer.Option(metavar="LIST", help="What to ask for, of: code, prose, random.")
    ] = "code,prose,random",
    temperature: Annotated[
        str, typer.Option(metavar="LIST", help="Sampling temperatures; 0 = greedy.")
    ] = "0,0.8",
    streams: Annotated[str, typer.Option(metavar="LIST", help="Requests at the same time.")] = "1,16",
    rtt: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Round trips between drafter and verifier, in ms.",
            show_default="0,20; with --url none",
        ),
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 96,
    peers: Annotated[
        bool,
        typer.Option("--peers/--no-peers", help="Measure transformers' generate too.", show_default=False),
    ] = True,
    lock_step: Annotated[
        bool,
        typer.Option(
            "--lock-step/--no-lock-step",
            help="Measure drafts that wait for each verdict too.",
            show_default=False,
        ),
    ] = True,
    chains: Annotated[
        bool, typer.Option("--chains", help="Measure streaming drafts without branches too.")
    ] = False,
    num_speculative_tokens: options.NumSpeculativeTokens = NUM_SPECULATIVE_TOKENS,
    kv_memory: options.KvMemory = "2GiB",
    draft_quantization: options.DraftQuantization = None,
    cores: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET/DRAFT",
            help="CPU cores of each model, such as 0/1 or 0,1/2,3; any = wherever the system puts them. "
            "transformers gets all of them.",
            show_default="half of the machine each",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the order in which is measured.")] = 0,
    url: Annotated[
        str | None,
        typer.Option(
            help="Measure this OpenAI-compatible server instead; it is not started.", show_default="none"
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="With --url: the model's name there.", show_default="the first it lists"),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the result as JSON and pictures.", show_default="none"),
    ] = None,
) -> None:
    """Measure how fast text comes: with drafts, without, in lock-step, and from transformers."""
    for name in (
        "OUTRIDER_STORE",
        "OUTRIDER_API_KEYS",
    ):  # of other routers: these processes keep to themselves
        os.environ.pop(name, None)
    with reported("bench"):
        from outrider_cli.bench.settings import Settings, numbers, parse_cores, words
        from outrider_cli.serve import choose_models

        available = (
            sorted(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else list(range(os.cpu_count() or 1))
        )
        settings = Settings(
            workloads=words(workload),
            temperatures=numbers("--temperature", temperature, float, 0),
            streams=tuple(int(count) for count in numbers("--streams", streams, int, 1)),
            rtts_ms=numbers("--rtt", rtt or ("0" if url else "0,20"), float, 0),
            repetitions=repetitions,
            max_tokens=max_tokens,
            seed=seed,
            models=None if url and target is None else choose_models(target, draft, 1),
            url=url,
            model=model,
            lock_step=lock_step,
            chains=chains,
            peers=peers,
            num_speculative_tokens=num_speculative_tokens,
            kv_memory=kv_memory,
            draft_quantization=draft_quantization.value if draft_quantization else None,
            cores=parse_cores(cores, available),
        )
        measure(settings, write)


def measure(settings: Settings, write: Path | None) -> None:
    """Runs the plan, shows what it found, and keeps it in the folder."""
    import asyncio
    import selectors

    from rich.console import Console

    from outrider_cli.bench import plots, report
    from outrider_cli.bench.goals import outcomes
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
    reached = outcomes(result.runs)
    if reached:
        console.print(report.goals_table(reached))
    for sentence in report.sentences(settings, result):
        console.print(sentence, highlight=False)
    if write is not None:
        about: report.Json = {
            "command": "outrider " + " ".join(sys.argv[1:]),
            "machine": machine(),
            "versions": {name: version(name) for name in PACKAGES},
            "load_before": load_before,
        }
        kept = json.dumps(report.as_json(settings, result, about), indent=1)
        (write / RESULT).write_text(kept + "\n", encoding="utf-8")
        drawn = plots.draw(settings, result, write)
        console.print(
            f"kept in {write}: {', '.join([RESULT, *(path.name for path in drawn)])}", highlight=False
        )


def machine() -> str:
    """The processor's name, where the system tells, and the number of cores."""
    try:
        told = dict(re.findall(r"(model name|cpu family|model)\s*: (.+)", Path("/proc/cpuinfo").read_text()))
    except OSError:
        told = {}
    name = told.get("model name", platform.machine())
    if "cpu family" in told and "model" in told:  # of one name there are fast ones and slow ones
        name += f" (family {told['cpu family']}, model {told['model']})"
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}"
