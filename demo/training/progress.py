"""Says how far a stage of the training is: a line now and then, on a terminal as in a log."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console

CONSOLE = Console()
LINE_SECONDS = 20.0


def stage(title: str, total: int) -> Callable[[str], None]:
    """Returns what is called after each of `total` steps, with a short note: it prints a line at most every
    `LINE_SECONDS`, and at the end."""
    began = last = time.monotonic()
    done = 0

    def advance(note: str) -> None:
        nonlocal done, last
        done += 1
        now = time.monotonic()
        if now - last >= LINE_SECONDS or done == total:
            last = now
            CONSOLE.print(f"{title}: {done}/{total}, {now - began:.0f} s  {note}", highlight=False)

    return advance
