"""Says how far a run is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_SECONDS = 20.0


class Stage:
    """A part of a run, used as a context: `at` says how much of it is done."""

    def __init__(self, title: str, total: int, console: Console) -> None:
        self._title, self._total, self._console = title, total, console
        self._told = time.monotonic()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:.0f}%"),
        )
        times = (TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
        self._bar = Progress(*columns, *times, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task(title, total=total, note="")

    def __enter__(self) -> Stage:
        self._bar.start()
        if not self._console.is_terminal:
            self._console.print(self._title, highlight=False)
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def at(self, done: int, note: str = "") -> None:
        self._bar.update(self._task, completed=done, note=note)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._told >= LINE_SECONDS:
            self._told = now
            self._console.print(f"{self._title}: {done / self._total:.0%} {note}", highlight=False)
