"""The likeliest of several answers to a prompt: OpenAI's `best_of`. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from router.api.logprobs import Scored


def best(scored: Sequence[Sequence[Scored]], of: int, told: int) -> list[int]:
    """Returns which answers are told: of each `of`, one prompt's, the `told` with the greatest
    log-probability a token, greatest first; of equals the earlier."""
    likelihood = [sum(one.own.logprob for one in each) / max(len(each), 1) for each in scored]
    groups = (range(first, first + of) for first in range(0, len(scored), of))
    return [index for group in groups for index in sorted(group, key=lambda i: -likelihood[i])[:told]]
