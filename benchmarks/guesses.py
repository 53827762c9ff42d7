"""Measures what guesses without a draft model bring: of the service's drafter, of predictions, of grammars.

    outrider serve --drafters 0 --port 8191            # or with --propose suffix, or with a draft model
    python benchmarks/guesses.py --url http://127.0.0.1:8191

Asks the suite's copy-edit conversations, with the text to be edited as prediction and without, and for JSON
by two schemas: of choices, most of which a grammar forces, and of texts; `--workloads` may name other kinds
of the suite, too. Each with drafts, and without any (num_speculative_tokens = 0); with `--other`, of a second
service that runs beside it, also with that one's drafts; what goes without drafts is asked of the two by
turns, as a service compares the ways over all that it is asked. All are asked in turn, one at a time, so that
whatever else the machine does falls on all. Told are the tokens a step of the target, which no other load
changes, and the tokens a second.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Collection
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.keep import Write, keep
from outrider_cli.bench.suite import messages, suite

CONSOLE = Console()
STATES = ["not_measured", "below_average", "average", "above_average"]
NAMES = [
    "air_temperature", "relative_humidity", "atmospheric_pressure", "wind_direction", "wind_velocity",
    "precipitation_amount", "cloud_coverage", "visibility_distance", "ultraviolet_radiation", "snow_depth",
]  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {name: {"enum": STATES} for name in NAMES},
    "required": NAMES,
    "additionalProperties": False,
}
REPORT = {"role": "user", "content": "Report the weather of a day in spring as JSON."}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "occupation": {"type": "string", "maxLength": 40},
        "description": {"type": "string", "maxLength": 120},
    },
    "required": ["name", "age", "occupation", "description"],
    "additionalProperties": False,
}
STORY = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "summary": {"type": "string", "maxLength": 300},
        "people": {"type": "array", "minItems": 3, "maxItems": 3, "items": PERSON},
    },
    "required": ["title", "summary", "people"],
    "additionalProperties": False,
}
TELL = {"role": "user", "content": "Tell a short story of three people in a village as JSON."}
WORKLOADS = ("copy-edit", "json of choices", "json of texts")
PLAIN, OTHER = "no drafts", "the other's drafts"
OFF = {"num_speculative_tokens": 0}
Asked = dict[str, Any]


def copy_edits() -> list[tuple[Asked, Asked]]:
    """Returns (the request, its prediction) of each conversation."""
    found = []
    for conversation in suite()["copy-edit"]:
        text = conversation[-1].partition(":")[2].strip()
        prediction = {"prediction": {"type": "content", "content": text}}
        found.append(({"messages": messages(conversation)}, prediction))
    return found


def requests(workloads: Collection[str]) -> list[tuple[str, str, Asked]]:
    """Returns (workload, way, request) of these."""
    copy_edit, *structured = WORKLOADS
    found: list[tuple[str, str, Asked]] = []
    for asked, prediction in copy_edits():
        found += [(copy_edit, PLAIN, asked | OFF), (copy_edit, "drafts", asked), (copy_edit, OTHER, asked)]
        found += [(copy_edit, "drafts and prediction", asked | prediction)]
    for workload, turn, schema in zip(structured, (REPORT, TELL), (SCHEMA, STORY), strict=True):
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        asked = {"messages": [turn], "response_format": form}
        found += [(workload, PLAIN, asked | OFF), (workload, "drafts", asked), (workload, OTHER, asked)]
    for kind, conversations in suite().items():
        for conversation in conversations if kind != copy_edit else ():
            asked = {"messages": messages(conversation)}
            found += [(kind, PLAIN, asked | OFF), (kind, "drafts", asked), (kind, OTHER, asked)]
    return [one for one in found if one[0] in workloads]


def ask(client: httpx.Client, asked: Asked) -> tuple[dict[str, Any], float]:
    """Returns the answer, and how long it took."""
    began = time.perf_counter()
    response = client.post("/v1/chat/completions", json={"seed": 1, **asked})
    response.raise_for_status()
    return response.json(), time.perf_counter() - began


def main(
    url: Annotated[str, typer.Option(help="Of the service.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 256,
    repetitions: Annotated[int, typer.Option(min=1)] = 3,
    workloads: Annotated[str, typer.Option(help="What to ask for.")] = ",".join(WORKLOADS),
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    other: Annotated[str | None, typer.Option(help="Of a second service with the same target.")] = None,
    write: Write = None,
) -> None:
    """Prints the tokens a step, and the rates over those without drafts, of which median and range are
    told."""
    known = dict.fromkeys((*WORKLOADS, *suite()))
    if unknown := set(workloads.split(",")) - known.keys():
        raise typer.BadParameter(f"must be of {', '.join(known)}, not {unknown.pop()!r}")
    told: dict[str, Any] = {}
    texts: dict[str, str] = {}
    asked_of = [httpx.Client(base_url=each, timeout=600) for each in (url, other or url)]
    plain_at_other = cycle((False, other is not None))
    with asked_of[0] as client, asked_of[1] as other_client:
        for _ in range(repetitions):
            sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
            for workload, way, asked in requests(workloads.split(",")):
                if way == OTHER and other is None:
                    continue
                asked = asked | {"max_tokens": max_tokens, "temperature": temperature}
                at_other = next(plain_at_other) if way == PLAIN else way == OTHER
                answer, seconds = ask(other_client if at_other else client, asked)
                choice, usage = answer["choices"][0], answer["usage"]
                same = texts.setdefault(str(asked["messages"]), choice["message"]["content"])
                if same != choice["message"]["content"]:
                    raise SystemExit(f"{workload}, {way}: another text than before")
                accepted = answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
                tokens = usage["completion_tokens"]
                for place, value in enumerate((tokens, tokens - accepted, seconds)):
                    sums[workload, way][place] += value
            for (workload, way), (tokens, steps, seconds) in sums.items():
                plain_tokens, _, plain_seconds = sums[workload, PLAIN]
                over = tokens / seconds / (plain_tokens / plain_seconds)
                row = told.setdefault(f"{workload}, {way}", defaultdict(list))
                row["tokens_a_step"].append(round(tokens / steps, 3))
                row["tokens_a_second"].append(round(tokens / seconds, 2))
                row["over"].append(round(over, 3))
    table = Table("asked", "tokens a step", "tokens a second", "over no drafts")
    for name, row in told.items():
        ratios = sorted(row["over"])
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        rate = statistics.median(row["tokens_a_second"])
        table.add_row(name, f"{statistics.median(row['tokens_a_step']):.2f}", f"{rate:.1f}", spread)
    CONSOLE.print(table)
    keep(write, {"url": url, "max_tokens": max_tokens, "temperature": temperature, "rows": told})


if __name__ == "__main__":
    typer.run(main)
