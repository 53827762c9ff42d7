"""Who decides k, and what it brings: Outrider's own controllers against others, in virtual time.

    python benchmarks/simulate.py --write benchmarks/results

The controllers are the services' own code; steps, drafters and the line between them are simulated
(benchmarks/simulation), with made-up answers whose guesses are right as often as a draft's are in code, in
chat and in hostile text. Every way of choosing k gets the same answers. Says for every cell the goodput over
plain decoding, and whether the goals hold.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.keep import keep
from benchmarks.simulation.controllers import Ours
from benchmarks.simulation.costs import CPU, H200
from benchmarks.simulation.policies import Confidence, Fixed, Heuristic, Start
from benchmarks.simulation.traces import KINDS, Book, make
from benchmarks.simulation.world import BEYOND, MOST_DRAFTS, Policy, Result, World

CONSOLE = Console()
MACHINES = {"h200": H200, "cpu": CPU}
PRICES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6)  # that hindsight may choose from
FEWEST_ANSWERS = 32
WAITING_PAYS = 32  # sessions up to which fixed k may wait for drafts, too: with more, it never pays
OURS = "ours"
OURS_ALONE = "the verifier alone"  # k left at the most
PATHS = "paths alone"  # ours, but that a step verifies no trees
CHEAP = 0.03  # price of a token below which trees are to bring much
SAMPLED = ("chat",)  # kinds of answers that are drawn with noise, and no other
SHOWN = {  # by heading: the beginning of the ways' names, of which the best is shown; how its line is drawn
    "best k for all": ("k = ", "tab:gray", "-"),
    "+2/-1": ("+2/-1", "tab:orange", ":"),
    "confidence .4": ("confidence .4", "tab:green", ":"),
    "lock-step": ("lock-step", "tab:red", "--"),
    "hindsight": ("hindsight", "black", "--"),
    OURS: (OURS, "tab:blue", "-"),
}


@dataclass(frozen=True)
class Cell:
    machine: str  # one of MACHINES
    kind: str  # one of KINDS
    batch: int  # sessions at a time
    round_trip_ms: float


def cells(machines: Iterable[str], batches: Mapping[str, Sequence[int]]) -> list[Cell]:
    return [
        Cell(machine, kind, batch, round_trip)
        for machine in machines
        for kind in KINDS
        for batch in batches[machine]
        for round_trip in (1.0, 20.0)
    ]


def goodputs(cell: Cell, seed: int, answers_each: int, trees: bool = False) -> dict[str, Result]:
    """Returns what each way of choosing k brings; of those from which hindsight chooses, the best. `trees`:
    only what is needed to hold these against paths."""
    answers = max(FEWEST_ANSWERS, answers_each * cell.batch)
    book = Book.of(make(cell.kind, answers, seed, BEYOND))
    costs = MACHINES[cell.machine]

    starts = [Start.AT_ONCE, *([Start.BY_PRICE] if cell.batch < WAITING_PAYS else [])]

    def run(policy: Policy) -> Result:
        return World(book, costs, cell.batch, cell.round_trip_ms / 1e3, policy, seed).run()

    def best(policies: Iterable[Policy]) -> Result:
        return max((run(policy) for policy in policies), key=lambda result: result.goodput)

    found = {"plain": run(Fixed("plain", [0] * answers, Start.AT_ONCE))}
    if trees:
        return found | {each.name: run(each) for each in (Ours(PATHS), Ours(OURS, trees=True))}
    for k in range(1, MOST_DRAFTS + 1):
        found[f"k = {k}"] = best(Fixed("", [k] * answers, start) for start in starts)
    for k in (1, 2, 4, 8):
        found[f"lock-step, k = {k}"] = run(Fixed("", [k] * answers, Start.ALL_DRAFTS))
    found["hindsight"] = best(
        Fixed("", ks, start) for ks in {tuple(hindsight(book, price)) for price in PRICES} for start in starts
    )
    ours = Ours(PATHS), Ours(OURS_ALONE, router=False, trees=True), Ours(OURS, trees=True)
    for policy in (Heuristic(), Confidence(answers), *ours):
        found[policy.name] = run(policy)
    return found


def hindsight(book: Book, price: float) -> list[int]:
    """Returns the k of each answer that would have been its best, at a common price of a verified token."""
    ks = np.arange(MOST_DRAFTS + 1)
    tokens_a_step = np.stack([book.tokens / book.rounds(int(k)) for k in ks], axis=1)
    best: list[int] = np.argmax(tokens_a_step - price * ks, axis=1).tolist()
    return best


@dataclass(frozen=True)
class Row:
    """A cell's outcome; ratios of goodput."""

    cell: Cell
    plain: float  # tokens a second
    over_plain: dict[str, float]
    messages_per_token: float  # of the router, with ours
    drafted_per_token: float
    error_of_calibration: float  # expected, of the survival that ours goes by
    price: float  # of a token in a step, with paths alone

    @property
    def best_fixed(self) -> float:
        return self.best("k = ")

    def best(self, beginning: str) -> float:
        """Returns the best ratio of the ways whose name begins so."""
        found = (ratio for name, ratio in self.over_plain.items() if name.startswith(beginning))
        return max(found, default=math.nan)

    @property
    def over_hindsight(self) -> float:
        return self.over_plain[OURS] / max(self.best("hindsight"), self.best_fixed)

    @property
    def over_paths(self) -> float:
        return self.over_plain[OURS] / self.over_plain[PATHS]

    @property
    def over_best_fixed(self) -> float:
        return self.over_plain[OURS] / self.best_fixed


def row(cell: Cell, results: Mapping[str, Result]) -> Row:
    plain, ours = results["plain"].goodput, results[OURS]
    return Row(
        cell,
        plain,
        {name: result.goodput / plain for name, result in results.items()},
        ours.messages_per_token,
        ours.drafted_per_token,
        ours.error_of_calibration,
        results[PATHS].price,
    )


def goals(rows: Sequence[Row]) -> list[tuple[str, float, float]]:
    """Returns (what, worst ratio, at least)."""
    alone = [r.over_paths for r in rows if r.cell.batch == 1 and r.price < CHEAP and r.cell.kind in SAMPLED]
    switching = [r.over_best_fixed for r in rows if r.cell.kind == "switching" and r.cell.batch >= 128]
    found = [
        ("over plain decoding, anywhere", min(r.over_plain[OURS] for r in rows), 0.99),
        ("trees over paths", min(r.over_paths for r in rows), 0.99),
    ]
    if alone:
        found.append((f"trees over paths, one session, a price below {CHEAP}", min(alone), 1.15))
    if any(OURS_ALONE not in r.over_plain for r in rows):
        return found
    if switching:
        found.append(("over the best k for all, switching, batch >= 128", min(switching), 1.05))
    verifiers = min(r.over_plain[OURS] / r.over_plain[OURS_ALONE] for r in rows)
    return [
        *found,
        ("over the best k of each session in hindsight", min(r.over_hindsight for r in rows), 0.98),
        ("over the verifier's choice alone", verifiers, 0.99),
    ]


def show(rows: Sequence[Row]) -> None:
    table = Table("machine", "answers", "batch", "RTT ms", *SHOWN, "over hindsight", "over paths", "price")
    for r in rows:
        cell = r.cell
        table.add_row(
            *(cell.machine, cell.kind, str(cell.batch), f"{cell.round_trip_ms:g}"),
            *(f"{r.best(name):.2f}" for name, _, _ in SHOWN.values()),
            f"{r.over_hindsight:.3f}",
            f"{r.over_paths:.3f}",
            f"{r.price:.3f}",
        )
    CONSOLE.print(table)
    for what, ratio, least in goals(rows):
        CONSOLE.print(f"{what}: {ratio:.3f}, at least {least:g}: {'yes' if ratio >= least else 'NO'}")


def plot(rows: Sequence[Row], path: Path) -> None:
    """Plots goodput over plain decoding by batch, one panel for each machine, round trip and kind of
    answers."""
    from matplotlib.figure import Figure

    lines = sorted({(r.cell.machine, r.cell.round_trip_ms) for r in rows}, reverse=True)
    kinds = [kind for kind in KINDS if any(r.cell.kind == kind for r in rows)]
    figure = Figure(figsize=(3 * len(kinds), 2.6 * len(lines)), layout="tight")
    axes = figure.subplots(len(lines), len(kinds), squeeze=False)
    for panels, (machine, round_trip) in zip(axes, lines, strict=True):
        for panel, kind in zip(panels, kinds, strict=True):
            here = [r for r in rows if r.cell == Cell(machine, kind, r.cell.batch, round_trip)]
            positions = range(len(here))
            for label, (name, color, style) in SHOWN.items():
                panel.plot(positions, [r.best(name) for r in here], style, color=color, label=label)
            panel.axhline(1, color="lightgray", linewidth=0.8, zorder=0)
            panel.set_xticks(positions, [str(r.cell.batch) for r in here])
            panel.set_title(f"{kind}, {machine}, {round_trip:g} ms", fontsize=9)
    for panel in axes[-1]:
        panel.set_xlabel("sessions")
    for panels in axes:
        panels[0].set_ylabel("goodput over plain")
    axes[0][0].legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main(
    machine: Annotated[list[str] | None, typer.Option(help="h200, cpu; both where left out.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Sessions at a time.")] = None,
    kind: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(KINDS)}; all where left out.")
    ] = None,
    answers: Annotated[int, typer.Option(min=2, help="Answers for each session's place.")] = 2,
    trees: Annotated[bool, typer.Option("--trees", help="Only plain decoding, paths and trees.")] = False,
    seed: Annotated[int, typer.Option(help="Of answers and noise.")] = 1,
    write: Annotated[Path | None, typer.Option(help="Folder for simulate.json and simulate.png.")] = None,
) -> None:
    """Simulate every way of choosing k."""
    machines, kinds = machine or list(MACHINES), kind or list(KINDS)
    for name, known in (*((m, MACHINES) for m in machines), *((k, KINDS) for k in kinds)):
        if name not in known:
            raise SystemExit(f"{name!r} is not one of {', '.join(known)}")
    batches = {"h200": batch or (1, 4, 32, 128, 256), "cpu": batch or (1, 4, 16, 32)}
    chosen = [cell for cell in cells(machines, batches) if cell.kind in kinds]
    with ProcessPoolExecutor() as pool:
        found = pool.map(goodputs, chosen, repeat(seed), repeat(answers), repeat(trees))
        results = list(track(found, "Simulating", total=len(chosen), console=CONSOLE))
    rows = [row(cell, result) for cell, result in zip(chosen, results, strict=True)]
    show(rows)
    if write is not None:
        result = {
            "goals": [dict(zip(("goal", "worst", "at_least"), goal, strict=True)) for goal in goals(rows)],
            "cells": [
                asdict(r) | {"over_hindsight": r.over_hindsight, "over_paths": r.over_paths} for r in rows
            ],
        }
        write.mkdir(parents=True, exist_ok=True)
        keep(write / "simulate.json", result)
        if not trees:
            plot(rows, write / "simulate.png")


if __name__ == "__main__":
    typer.run(main)
