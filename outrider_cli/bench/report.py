"""What a run found, as JSON and as tables. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.table import Table

from outrider.options.model_id import checkpoint_name
from outrider_cli.bench.cells import ALL_KINDS, PEERS, PLAIN, SERVER, STREAMING, Cell, cells
from outrider_cli.bench.figures import Runs, figures, over, percentile, with_all_kinds
from outrider_cli.bench.measuring import Result
from outrider_cli.bench.settings import Settings
from outrider_cli.speedup import cost

Json = dict[str, object]

HEADINGS = ("tokens/s", "over plain", "first ms", "gap ms", "accepted", "length", "per core-s", "loops")
COST = "a million"
LEGEND = (
    "Medians over repetitions, quartiles in brackets; times as p50/p95. first: to the first token, prompt "
    "read before; gap: between two arrivals of text; length: tokens a step with drafts; per core-s: tokens "
    "for each second of processor time that all who serve used; loops: share of the "
    "text within 8 words or marks that it had before, which are easy to guess."
)


def as_json(settings: Settings, result: Result, about: Json) -> Json:
    """Returns everything, repetitions included. `about` is what made it (command, machine, versions)."""
    runs = with_all_kinds(result.runs)
    return {
        **about,
        "plan": {**asdict(settings), "models": _names(settings)},
        "cells": [_cell(runs, cell) for cell in in_table_order(settings, runs)],
        "same_text": {way: _same(result, way, settings.reference) for way in settings.ways},
        "reading_ms": {
            way: {"p50": 1e3 * percentile(seconds, 50), "p95": 1e3 * percentile(seconds, 95)}
            for way, seconds in result.reading_seconds.items()
        },
        "transformers_tuned_k": [
            {"workload": workload, "temperature": temperature, "k": k}
            for (workload, temperature), k in result.tuned.items()
        ],
        "carried_bytes": result.carried_bytes,
        "rejections": None if result.rejections is None else asdict(result.rejections),
    }


def _names(settings: Settings) -> Json | None:
    """Returns the checkpoints, without the folders in which they lie on this machine."""
    if settings.models is None:
        return None
    return {
        "target": checkpoint_name(settings.models.target),
        "draft": checkpoint_name(settings.models.draft or ""),
    }


def in_table_order(settings: Settings, runs: Runs) -> list[Cell]:
    """Returns the cells in the order of their settings, the ways of each side by side."""
    kinds = (*settings.workloads, ALL_KINDS)
    every = cells(settings.ways, kinds, settings.temperatures, settings.streams, settings.rtts_ms)
    return [cell for cell in every if cell in runs]


def _cell(runs: Runs, cell: Cell) -> Json:
    ways = {other.way for other in runs if other.setting == cell.setting} - {cell.way}
    ratios = {way: over(runs, cell, way) for way in sorted(ways)}
    return {
        **cell.as_json(),
        **asdict(figures(runs[cell])),
        "over": {way: asdict(ratio) for way, ratio in ratios.items() if ratio is not None},
        "repetitions": [
            {"rate": one.rate, "drafted": one.drafted, "accepted": one.accepted} for one in runs[cell]
        ],
    }


def _same(result: Result, way: str, reference: str) -> Json:
    alike, both = result.texts.same(way, reference)
    return {"same": alike, "requests": both}


def cells_tables(settings: Settings, result: Result) -> Iterator[Table]:
    """Yields a table for each setting: narrow enough for a terminal."""
    runs = with_all_kinds(result.runs)
    for setting, alike in groupby(in_table_order(settings, runs), key=lambda cell: cell.setting):
        table = Table(box=SIMPLE_HEAD, title=str(setting), title_justify="left", padding=(0, 1, 0, 0))
        priced = (COST,) if settings.price_per_hour is not None else ()
        table.add_column("served by", no_wrap=True)
        for name in (*HEADINGS, *priced):
            table.add_column(name, justify="right", no_wrap=True)
        for cell in alike:
            table.add_row(cell.way, *_row(runs, cell, settings.price_per_hour))
        yield table


def _row(runs: Runs, cell: Cell, price_per_hour: float | None) -> list[str]:
    found, faster = figures(runs[cell]), over(runs, cell, PLAIN)
    return [
        f"{found.rate.median:.1f}",
        "" if faster is None or cell.way == PLAIN else str(faster),
        _pair(found.first_token_ms),
        "" if found.gap_ms is None else _pair(found.gap_ms),
        "" if found.acceptance_rate is None else f"{found.acceptance_rate:.2f}",
        "" if found.mean_accepted_length is None else f"{found.mean_accepted_length:.2f}",
        "" if found.tokens_per_core_second is None else f"{found.tokens_per_core_second.median:.1f}",
        f"{found.looped:.0%}",
        *(() if price_per_hour is None else (f"{cost(found.rate.median, price_per_hour):.2f}",)),
    ]


def _pair(values: tuple[float, float]) -> str:
    return f"{values[0]:.0f}/{values[1]:.0f}"


def sentences(settings: Settings, result: Result) -> list[str]:
    """Returns sentences that say what the tables do not."""
    said = []
    for way in settings.ways:
        alike, both = result.texts.same(way, settings.reference)
        sampled = any(settings.temperatures) and way in PEERS
        if way != settings.reference and both:
            told = f"{way}: the same text as {settings.reference} decoding in {alike} of {both} requests"
            said.append(told + ("; it draws other random numbers where it samples" if sampled else ""))
        elif way == SERVER and both:
            said.append(f"the same text whenever the same was asked: {alike} of {both} requests")
    for way, seconds in result.reading_seconds.items():
        p50, p95 = percentile(seconds, 50), percentile(seconds, 95)
        said.append(
            f"{way}: first token of a new prompt, nobody else asking: {_pair((1e3 * p50, 1e3 * p95))} ms"
        )
    if result.rejections is not None:
        had = f"a branch had {result.rejections}"
        said.append(f"{STREAMING}: of the tokens that the target took in a draft's place, {had}")
    return said
