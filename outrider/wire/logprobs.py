"""How likely the model found a token, and which it found likeliest: plain data, and a message's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider.errors import InvalidRequest

MAX_TOP_LOGPROBS = 20  # OpenAI's and vLLM's


class Logprob(NamedTuple):
    """Of the token at a position. By the model's own distribution: before penalties, biases, temperature and
    cuts."""

    logprob: float  # natural
    top: tuple[tuple[int, float], ...] = ()  # the likeliest ids there with theirs, the likeliest first


Logprobs = tuple[Logprob, ...]
Numbers = tuple[list[float], list[int], list[float]]
"""Of each token; and, equally many for each, ids and theirs, one token's after the other's."""


def numbers(logprobs: Sequence[Logprob]) -> Numbers:
    top = [pair for one in logprobs for pair in one.top]
    return [one.logprob for one in logprobs], [token for token, _ in top], [of for _, of in top]


def from_numbers(of_tokens: Sequence[float], top_tokens: Sequence[int], top: Sequence[float]) -> Logprobs:
    """Raises InvalidRequest if they do not fit each other."""
    count = len(of_tokens)
    if not count:
        return ()
    if len(top_tokens) != len(top) or len(top) % count or len(top) > count * MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"{count} log-probabilities come with {len(top_tokens)} and {len(top)} likeliest"
        )
    pairs, each = list(zip(top_tokens, top, strict=True)), len(top) // count
    return tuple(Logprob(of, tuple(pairs[i * each : (i + 1) * each])) for i, of in enumerate(of_tokens))
