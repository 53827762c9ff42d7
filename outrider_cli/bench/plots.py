"""Pictures of a run. Needs matplotlib, which `pip install 'outrider[bench]'` brings."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import StartupError
from outrider_cli.bench.cells import CHAINS, LOCK_STEP, SERVER, STREAMING, Cell, Setting
from outrider_cli.bench.figures import Spread, figures
from outrider_cli.bench.goals import over_plain
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
    "server": "#1f6fb4",
    "transformers": "#c9c9c9",
    "assisted": "#e3a59f",
    "assisted, tuned": "#c0392b",
}
MARKS = "os^Dv<>"
DOTS_PER_INCH = 130


def check_installed() -> None:
    """Raises StartupError if nothing can be drawn."""
    if find_spec("matplotlib") is None:
        raise StartupError("pictures need matplotlib: pip install 'outrider[bench]', or leave out --write")


def draw(settings: Settings, result: Result, folder: Path) -> list[Path]:
    """Writes the pictures that this run gives material for, and returns their paths."""
    pictures = {"rates.png": rates(settings, result)}
    if len(settings.streams) > 1:
        series = [(way, rtt) for way in _lines(settings) for rtt in settings.rtts_ms]
        pictures["streams.png"] = along(
            settings, result, "streams", [float(count) for count in settings.streams], series, _by_streams
        )
    if len(settings.rtts_ms) > 1:
        others = [(way, float(count)) for way in _lines(settings) for count in settings.streams]
        pictures["rtt.png"] = along(
            settings,
            result,
            "round trip between drafter and verifier, ms",
            list(settings.rtts_ms),
            others,
            _by_rtt,
        )
    for name, picture in pictures.items():
        picture.savefig(folder / name, dpi=DOTS_PER_INCH)
    return [folder / name for name in pictures]


def rates(settings: Settings, result: Result) -> Figure:
    """Draws the tokens a second of each way of serving, with the fewest streams and the shortest line."""
    figure, axes = _figure(1, 1)
    kinds = list(product(settings.workloads, settings.temperatures))
    width = 0.8 / len(settings.ways)
    for number, way in enumerate(settings.ways):
        for place, (workload, temperature) in enumerate(kinds):
            setting = Setting(workload, temperature, min(settings.streams), min(settings.rtts_ms))
            found = result.runs.get(Cell(way, setting))
            if found:
                rate = figures(found).rate
                at = place + (number - (len(settings.ways) - 1) / 2) * width
                label = way if place == 0 else None
                axes[0].bar(at, rate.median, width, yerr=_error(rate), color=COLOURS[way], label=label)
    axes[0].set_xticks(range(len(kinds)), [f"{workload}\nT = {degree:g}" for workload, degree in kinds])
    axes[0].set_ylabel("output tokens a second")
    axes[0].set_title(f"streams: {min(settings.streams)}, round trip: {min(settings.rtts_ms):g} ms")
    axes[0].legend(fontsize="small")
    return figure


def along(
    settings: Settings,
    result: Result,
    axis: str,
    values: list[float],
    series: list[tuple[str, float]],
    setting: Callable[[str, float, float, float], Setting],
) -> Figure:
    """Draws a panel for each workload and temperature: how a rate changes along one of the settings.

    It is a ratio to plain decoding if that was measured, otherwise tokens a second. `setting` makes one of
    workload, temperature, value on the axis, and value of the series."""
    panels = list(product(settings.temperatures, settings.workloads))
    figure, axes = _figure(len(settings.workloads), len(settings.temperatures))
    for panel, (temperature, workload) in zip(axes, panels, strict=True):
        for number, (way, other) in enumerate(series):
            cells = [Cell(way, setting(workload, temperature, value, other)) for value in values]
            spreads = [over_plain(result.runs, cell) or figures(result.runs[cell]).rate for cell in cells]
            panel.errorbar(
                values,
                [spread.median for spread in spreads],
                yerr=[[_error(spread)[side][0] for spread in spreads] for side in (0, 1)],
                color=COLOURS[way],
                marker=MARKS[number % len(MARKS)],
                linestyle="-" if other == series[0][1] else "--",
                label=f"{way}, {other:g} {'ms' if axis == 'streams' else 'streams'}",
            )
        if way != SERVER:
            panel.axhline(1, color=COLOURS["plain"], linewidth=0.8)
        panel.set_title(f"{workload}, T = {temperature:g}")
        panel.set_xlabel(axis)
        if axis == "streams":
            panel.set_xscale("log", base=2)
            panel.set_xticks(values, [f"{value:g}" for value in values])
    for panel in axes[:: len(settings.workloads)]:
        panel.set_ylabel("output tokens a second" + ("" if way == SERVER else ", over plain decoding"))
    axes[-1].legend(fontsize="small")
    return figure


def _lines(settings: Settings) -> list[str]:
    return [way for way in settings.ways if way in (STREAMING, CHAINS, LOCK_STEP, SERVER)]


def _by_streams(workload: str, temperature: float, streams: float, rtt_ms: float) -> Setting:
    return Setting(workload, temperature, int(streams), rtt_ms)


def _by_rtt(workload: str, temperature: float, rtt_ms: float, streams: float) -> Setting:
    return Setting(workload, temperature, int(streams), rtt_ms)


def _error(spread: Spread) -> list[list[float]]:
    """Returns the distances below and above the median, as matplotlib wants it: [2, 1]."""
    return [[spread.median - spread.lower_quartile], [spread.upper_quartile - spread.median]]


def _figure(columns: int, rows: int) -> tuple[Figure, list[Axes]]:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        rows, columns, figsize=(max(7.0, 4.2 * columns), 4.2 * rows), squeeze=False, layout="constrained"
    )
    return figure, list(axes.flatten())
