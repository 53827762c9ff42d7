"""Held-out text: standard-library modules that neither model of the pair has been trained on.

The files are read from the running machine's standard library, so nothing is copied into the
repository. Prompts are cut at line starts and are the same on every run for one Python version.
"""

from __future__ import annotations

from outrider.bench.workloads import HELD_OUT, heldout_text, stdlib_root

__all__ = ["HELD_OUT", "heldout_prompts", "heldout_text", "stdlib_root"]


def heldout_prompts(count: int, lines: int = 12, skip: int = 0) -> list[str]:
    """`count` prompts of `lines` whole lines each, taken from all held-out modules in turn.

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
