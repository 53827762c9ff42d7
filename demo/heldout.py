"""Held-out text: standard-library modules that neither model of the pair has been trained on.

The files are read from the running machine's standard library, so nothing is copied into the
repository. Prompts are cut at line starts and are the same on every run for one Python version.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

HELD_OUT: tuple[str, ...] = (  # of the standard library: neither model of the demo pair has seen them
    "calendar.py",
    "csv.py",
    "fractions.py",
    "graphlib.py",
    "heapq.py",
    "html/parser.py",
    "json/decoder.py",
    "queue.py",
    "shlex.py",
    "statistics.py",
    "textwrap.py",
    "zipapp.py",
)


def heldout_prompts(count: int, lines: int = 12, skip: int = 0) -> list[str]:
    """Returns `count` prompts of `lines` whole lines each, taken from all held-out modules in turn.

    Round r takes the r-th block of `lines` lines from each module (modules that have run out are
    passed over); `skip` leaves out that many prompts at the start. Each prompt ends after the last
    non-blank character of its last line, so that tokenising it does not split a newline run
    differently from running text.
    """
    if count < 1 or lines < 1 or skip < 0:
        raise ValueError("count and lines must be at least 1, skip at least 0")
    sources = [heldout_text(name).splitlines() for name in HELD_OUT]
    prompts: list[str] = []
    longest = max(len(source) for source in sources)
    for start in range(0, longest, lines):
        for source in sources:
            block = "\n".join(source[start : start + lines]).rstrip()
            if start + lines <= len(source) and block:
                prompts.append(block)
        if len(prompts) >= skip + count:
            return prompts[skip : skip + count]
    raise ValueError(f"the held-out modules give only {len(prompts)} prompts of {lines} lines")


def stdlib_root() -> Path:
    """Returns the folder that holds the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def heldout_text(name: str) -> str:
    """Returns the source of one held-out module, named as in `HELD_OUT`."""
    if name not in HELD_OUT:
        raise ValueError(f"{name} is not one of the held-out modules: {', '.join(HELD_OUT)}")
    return (stdlib_root() / name).read_text(encoding="utf-8")
