"""Pictures of a run. Needs matplotlib, which `pip install 'outrider[bench]'` brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import StartupError
from outrider_cli.bench.cells import CHAINS, LOCK_STEP, PATHS, PLAIN, SERVER, STREAMING, Cell, Setting
from outrider_cli.bench.figures import Spread, figures, over
from outrider_cli.bench.measuring import Result
from outrider_cli.bench.settings import Settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "plain": "#7f7f7f",
    "plain, all cores": "#4d4d4d",
    "lock-step": "#e6a532",
    "streaming": "#1f6fb4",
    "streaming, chains": "#8fbbe0",
    "streaming, paths": "#5795c9",
    "server": "#1f6fb4",
    "transformers": "#c9c9c9",
    "assisted": "#e3a59f",
    "assisted, tuned": "#c0392b",
}
MARKS = "os^Dv<>"
UNITS = {"streams": "streams", "rtt_ms": "ms"}
DOTS_PER_INCH = 130


def check_installed() -> None:
    """Raises StartupError if nothing can be drawn."""
    if find_spec("matplotlib") is None:
        raise StartupError("pictures need matplotlib: pip install 'outrider[bench]', or leave out --write")


def draw(settings: Settings, result: Result, folder: Path) -> list[Path]:
    """Writes the pictures that this run gives material for, and returns their paths."""
    pictures = {"rates.png": rates(settings, result)}
    if len(settings.streams) > 1:
        pictures["streams.png"] = along(settings, result, "streams", "rtt_ms")
    if len(settings.rtts_ms) > 1:
        pictures["rtt.png"] = along(settings, result, "rtt_ms", "streams")
    for name, picture in pictures.items():
        picture.savefig(folder / name, dpi=DOTS_PER_INCH)
    return [folder / name for name in pictures]


def rates(settings: Settings, result: Result) -> Figure:
    """Draws the tokens a second of each way of serving, with the fewest streams and the shortest line."""
    figure, [axes] = _figure(1, 1)
    kinds = list(product(settings.workloads, settings.temperatures))
    streams, rtt_ms = min(settings.streams), min(settings.rtts_ms)
    width = 0.8 / len(settings.ways)
    for number, way in enumerate(settings.ways):
        cells = [Cell(way, Setting(*kind, streams, rtt_ms)) for kind in kinds]
        at = [place for place, cell in enumerate(cells) if cell in result.runs]
        spreads = [figures(result.runs[cells[place]]).rate for place in at]
        middle = (number - (len(settings.ways) - 1) / 2) * width
        axes.bar(
            [place + middle for place in at],
            [spread.median for spread in spreads],
            width,
            yerr=_errors(spreads),
            color=COLOURS[way],
            label=way,
        )
    axes.set_xticks(range(len(kinds)), [f"{workload}\nT = {degree:g}" for workload, degree in kinds])
    axes.set_ylabel("output tokens a second")
    axes.set_title(f"streams: {streams}, round trip: {rtt_ms:g} ms")
    axes.legend(fontsize="small")
    return figure


def along(settings: Settings, result: Result, axis: str, other: str) -> Figure:
    """Draws a panel for each workload and temperature: how a rate changes along one field of a setting, with
    a line for each value of the other.

    It is a ratio to plain decoding if that was measured, otherwise tokens a second."""
    values = {"streams": settings.streams, "rtt_ms": settings.rtts_ms}
    ways = [way for way in settings.ways if way in (STREAMING, PATHS, CHAINS, LOCK_STEP, SERVER)]
    figure, panels = _figure(len(settings.workloads), len(settings.temperatures))
    for panel, (temperature, workload) in zip(
        panels, product(settings.temperatures, settings.workloads), strict=True
    ):
        setting = Setting(workload, temperature, 1, 0.0)
        for number, (way, told) in enumerate(product(ways, values[other])):
            cells = [Cell(way, replace(setting, **{axis: at, other: told})) for at in values[axis]]  # type: ignore[arg-type]
            spreads = [over(result.runs, cell, PLAIN) or figures(result.runs[cell]).rate for cell in cells]
            panel.errorbar(
                values[axis],
                [spread.median for spread in spreads],
                yerr=_errors(spreads),
                color=COLOURS[way],
                marker=MARKS[number % len(MARKS)],
                linestyle="-" if told == values[other][0] else "--",
                label=f"{way}, {told:g} {UNITS[other]}",
            )
        panel.set_title(f"{workload}, T = {temperature:g}")
        panel.set_xlabel(axis if axis == "streams" else "round trip between drafter and verifier, ms")
        panel.set_ylabel("output tokens a second" + ("" if ways == [SERVER] else ", over plain decoding"))
    panels[-1].legend(fontsize="small")
    return figure


def _errors(spreads: Sequence[Spread]) -> list[list[float]]:
    """Returns the distances below and above each median, as matplotlib wants them: [2, n]."""
    return [
        [spread.median - spread.lower_quartile for spread in spreads],
        [spread.upper_quartile - spread.median for spread in spreads],
    ]


def _figure(columns: int, rows: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    size = (max(7.0, 4.2 * columns), 4.2 * rows)
    figure = Figure(figsize=size, layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flatten())
