"""`outrider distill`: makes a draft for a target."""

from __future__ import annotations

from typing import Any

from distillation.options import DistillOptions
from outrider.options.option import build
from outrider_cli.commands import command
from outrider_cli.reporting import reported


def _distill(**given: Any) -> None:
    with reported("distill"):
        options = build(DistillOptions, given)
        from rich.console import Console

        from distillation.run import distill, lines  # heavy: torch

        report = distill(options, Console(stderr=True))
        print("\n".join(lines(report, options.out)), flush=True)


distill = command(
    _distill,
    "distill",
    "Make a draft for a target, from text that the target writes. The same command goes on after a kill.",
    DistillOptions,
)
