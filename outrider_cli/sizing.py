"""`outrider plan`: what drafts would gain on given machines, and how many drafters a verifier takes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from outrider_cli.reporting import reported

if TYPE_CHECKING:
    from outrider_cli.speedup import Pair, Speedup

TABLE = (1, 2, 3, 4, 6, 8, 12, 16)  # values of k


def plan(
    target_step_ms: Annotated[
        float,
        typer.Option("--target-step-ms", help="Time of a step of plain decoding, with all sessions in it."),
    ],
    draft_token_ms: Annotated[
        float, typer.Option("--draft-token-ms", help="Time in which the draft model drafts one token.")
    ],
    acceptance: Annotated[
        float,
        typer.Option(
            "--acceptance", help="Share of draft tokens that are right, as requests with -k 1 show it."
        ),
    ],
    rtt_ms: Annotated[
        float, typer.Option("--rtt-ms", help="Round trip between drafter and verifier, as ping shows it.")
    ],
    target_token_ms: Annotated[
        float, typer.Option("--target-token-ms", help="What each draft token adds to a step of the target.")
    ] = 0.0,
    num_speculative_tokens: Annotated[
        int, typer.Option("--num-speculative-tokens", "--k", "-k", help="Most draft tokens in a step.")
    ] = 8,
    sessions: Annotated[int, typer.Option("--sessions", help="Sessions at a time on one verifier.")] = 1,
    draft_batch: Annotated[
        int,
        typer.Option("--draft-batch", help="Sessions for which one forward of the draft model drafts."),
    ] = 1,
) -> None:
    """Say how much faster decoding gets with drafts, and how many drafters each verifier takes."""
    with reported("plan"):
        from outrider_cli.speedup import Pair, expect

        pair = Pair(
            target_step_ms=target_step_ms,
            draft_token_ms=draft_token_ms,
            acceptance=acceptance,
            rtt_ms=rtt_ms,
            target_token_ms=target_token_ms,
            sessions=sessions,
            draft_batch=draft_batch,
        )
        chosen = expect(pair, num_speculative_tokens)
        rows = [expect(pair, k) for k in sorted({*TABLE, num_speculative_tokens})]
        print("\n".join([*table(rows, chosen.k), "", *summary(pair, chosen)]), flush=True)


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


def ratio(drafters: float) -> str:
    """Returns the ratio in whole workers: 2.3 drafters for a verifier are 3, and .3 are one drafter for three
    verifiers."""
    if drafters <= 0:
        return "no drafters"
    if drafters > 1:
        return f"{math.ceil(drafters - 1e-9)} drafters for each verifier"
    verifiers = math.floor(1 / drafters + 1e-9)
    return "1 drafter for each verifier" if verifiers == 1 else f"1 drafter for every {verifiers} verifiers"
