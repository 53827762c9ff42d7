"""`outrider distill`: makes a draft or a speculator for a target."""

from __future__ import annotations

from typing import Any

from distillation.options import DistillOptions
from outrider.options.option import build
from outrider_cli.commands import command
from outrider_cli.reporting import reported
from outrider_cli.sizing import TABLE
from outrider_cli.speedup import Pair, expect

RTT_MS = 0.2  # between processes of one machine


def _distill(**given: Any) -> None:
    with reported("distill"):
        options = build(DistillOptions, given)
        from rich.console import Console

        from distillation.report import gains, lines
        from distillation.run import distill  # heavy: torch

        report = distill(options, Console(stderr=True))
        expected = gains(report) if options.speculator else predicted(report)
        print("\n".join([*lines(report, options.out), *expected]), flush=True)


def predicted(report: dict[str, Any]) -> list[str]:
    """Returns what `outrider plan` computes from the report of a draft, a line for each temperature."""
    found = []
    for temperature, one in report["acceptance"]["by_temperature"].items():
        pair = Pair(
            target_step_ms=report["target_step_ms"],
            acceptance=min(one["acceptance"], 0.999),
            rtt_ms=RTT_MS,
            draft_token_ms=report["draft_token_ms"],
        )
        best = max((expect(pair, k) for k in TABLE), key=lambda each: each.speedup)
        found.append(
            f"temperature {temperature}: {best.speedup:.2f} times plain decoding at k = {best.k}, as "
            "`outrider plan` computes it"
        )
    return [*found, "outrider bench with this target and draft measures it"]


distill = command(
    _distill,
    "distill",
    "Make a draft or a speculator for a target, from text that the target writes. "
    "The same command goes on after a kill.",
    DistillOptions,
)
