"""`outrider plan`: what drafts would gain on given machines, and how many drafters a verifier takes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from outrider.options.option import build, check, option
from outrider_cli.commands import command
from outrider_cli.reporting import reported
from outrider_cli.speedup import Pair, Speedup, cost, expect

TABLE = (1, 2, 3, 4, 6, 8, 12, 16)  # values of k


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What `plan` is told."""

    pair: Pair
    num_speculative_tokens: int = option(8, "Most draft tokens in a step.", least=0, most=256, short="-k")
    price_per_hour: float | None = option(
        None, "Price of a worker's machine, to tell what a million tokens costs.", least=0, shown="none"
    )

    def __post_init__(self) -> None:
        check(self)


def _plan(**given: Any) -> None:
    with reported("plan"):
        told = build(PlanOptions, given)
        chosen = expect(told.pair, told.num_speculative_tokens)
        rows = [expect(told.pair, k) for k in sorted({*TABLE, told.num_speculative_tokens})]
        said = [*summary(told.pair, chosen), *costs(told, chosen)]
        print("\n".join([*table(rows, chosen.k), "", *said]), flush=True)


plan = command(
    _plan,
    "plan",
    "Say how much faster decoding gets with drafts, and how many drafters each verifier takes.",
    PlanOptions,
)


def table(rows: Iterable[Speedup], chosen: int) -> list[str]:
    """Returns a line for each k, the chosen one marked."""
    lines = ["    k  speed-up  tokens a step  drafters a verifier"]
    for row in rows:
        mark = ">" if row.k == chosen else " "
        columns = f"{row.k:>3}  {row.speedup:>7.2f}x  {row.tokens_per_step:>13.2f}  {row.drafters:>19.2f}"
        lines.append(f"{mark} {columns}")
    return lines


def summary(pair: Pair, chosen: Speedup) -> list[str]:
    """Returns sentences about the chosen k."""
    plain = 1000 / pair.target_step_ms
    lines = [
        f"With k = {chosen.k}: {chosen.speedup:.2f} times plain decoding, "
        f"{plain * chosen.speedup:.1f} tokens/s for each session instead of {plain:.1f}.",
        f"Pools: {ratio(chosen.drafters)}.",
    ]
    if chosen.speedup < 1:
        lines.append(
            "Drafts cost more than they gain here: serve without a draft model, or with a smaller k."
        )
    return lines


def costs(told: PlanOptions, chosen: Speedup) -> list[str]:
    """Returns a sentence about the price of a million tokens, with a verifier's share of the drafters."""
    if told.price_per_hour is None:
        return []
    plain = told.pair.sessions * 1000 / told.pair.target_step_ms  # tokens a second of a verifier
    alone = cost(plain, told.price_per_hour)
    drafted = cost(plain * chosen.speedup, told.price_per_hour * (1 + chosen.drafters))
    return [
        f"A million tokens: {drafted:.2f} with drafts, {alone:.2f} without, if a worker costs "
        f"{told.price_per_hour:g} an hour."
    ]


def ratio(drafters: float) -> str:
    """Returns the ratio in whole workers: 2.3 drafters for a verifier are 3, and .3 are one drafter for three
    verifiers."""
    if drafters <= 0:
        return "no drafters"
    if drafters > 1:
        return f"{math.ceil(drafters - 1e-9)} drafters for each verifier"
    verifiers = math.floor(1 / drafters + 1e-9)
    return "1 drafter for each verifier" if verifiers == 1 else f"1 drafter for every {verifiers} verifiers"
