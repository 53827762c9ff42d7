"""Progress bars: live on a terminal, one line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

CONSOLE = Console()
LOG_SECONDS = 20.0


@contextmanager
def steps_bar(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar of `total` steps; the value is called once a step with a short note on it."""
    if not CONSOLE.is_terminal:
        yield _log_lines(title, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=CONSOLE) as progress:
        task = progress.add_task(title, total=total, note="")

        def advance(note: str) -> None:
            progress.update(task, advance=1, note=note)

        yield advance


def _log_lines(title: str, total: int) -> Callable[[str], None]:
    """A stand-in for the bar where there is no terminal: a line at most every `LOG_SECONDS`."""
    began = last = time.monotonic()
    done = 0

    def advance(note: str) -> None:
        nonlocal done, last
        done += 1
        now = time.monotonic()
        if now - last >= LOG_SECONDS or done == total:
            last = now
            print(f"{title}: {done}/{total}, {now - began:.0f} s  {note}", flush=True)

    return advance
