"""The report of a run, as people read it."""

from __future__ import annotations

from typing import Any

from distillation.folder import REPORT

SHOWN = 5  # tokens that a draft is shown to propose


def lines(report: dict[str, Any], out: str) -> list[str]:
    """Returns the report as people read it."""
    shown, before = str(report.get("guesses", SHOWN)), report["untrained"].get("by_temperature", {})
    return [
        f"temperature  accepted  untrained  tokens a step at k = {shown}",
        *(
            f"{temperature:>11}  {one['acceptance']:>8.3f}  {before[temperature]['acceptance']:>9.3f}  "
            f"{one['tokens_per_step'][shown]:.2f}"
            for temperature, one in report["acceptance"]["by_temperature"].items()
        ),
        *(f"{name}: {share:.3f}" for name, share in report["acceptance"]["by_category"].items()),
        f"{report['vocabulary']:,} tokens to guess, which are {report['in_vocabulary']:.1%} of the text",
        *_times(report),
        f"outrider serve --target {report['options']['target']} --{kind(report)} {out}",
        f"{out}/{REPORT} has all figures",
    ]


def kind(report: dict[str, Any]) -> str:
    """Returns what was made, as the option that serves it is called."""
    return "speculator" if "guesses" in report else "draft"


def gains(report: dict[str, Any]) -> list[str]:
    """Returns what a speculator gains by a report, a line for each temperature."""
    if report["guess_ms"] is None:
        return []
    k = report["guesses"]
    takes = 1 + k * report["guess_ms"] / report["target_step_ms"]
    return [
        f"temperature {temperature}: {one['tokens_per_step'][str(k)] / takes:.2f} times plain decoding at "
        f"k = {k}, as long as a step of {k + 1} tokens takes as long as one of one"
        for temperature, one in report["acceptance"]["by_temperature"].items()
    ]


def _times(report: dict[str, Any]) -> list[str]:
    step = f"a step of the target {report['target_step_ms']} ms"
    if kind(report) == "draft":
        return [f"a draft token takes {report['draft_token_ms']} ms, {step}"]
    return [] if report["guess_ms"] is None else [f"a guess takes {report['guess_ms']} ms, {step}"]
