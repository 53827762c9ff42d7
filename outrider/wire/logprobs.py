"""How likely the model found a token, and which it found likeliest: plain data, and a message's numbers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.errors import InvalidRequest
from outrider.v1 import common_pb2

MAX_TOP_LOGPROBS = 20  # OpenAI's and vLLM's
MAX_PROMPT_LOGPROBS = 2**17  # of all prompts of a request, those of the likeliest included
MAX_ANSWER_LOGPROBS = 2**20  # of all answers to a request that has several


class Logprob(NamedTuple):
    """How likely the model found the token at a position, before penalties, biases, temperature and cuts."""

    logprob: float  # natural
    top: tuple[tuple[int, float], ...] = ()  # the likeliest ids there with theirs, the likeliest first


@dataclass(slots=True)
class PromptLogprobs:
    """How likely the model found a prompt's tokens but the first. In arrays, as they may be many."""

    logprobs: array[float] = field(default_factory=lambda: array("f"))
    ranks: array[int] = field(default_factory=lambda: array("I"))  # of each: 1 = the likeliest
    top_tokens: array[int] = field(default_factory=lambda: array("I"))  # for each equally many
    top: array[float] = field(default_factory=lambda: array("f"))

    def __len__(self) -> int:
        return len(self.logprobs)

    def extend(self, more: PromptLogprobs) -> None:
        """Adds those of the tokens that follow."""
        self.logprobs += more.logprobs
        self.ranks += more.ranks
        self.top_tokens += more.top_tokens
        self.top += more.top

    def fits(self, tokens: int, count: int, vocab_size: int) -> bool:
        """Returns whether they may be those of a prompt of so many tokens, with so many likeliest at each."""
        each = min(count, vocab_size)
        return (
            len(self.logprobs) == len(self.ranks) == tokens - 1
            and len(self.top_tokens) == len(self.top) == (tokens - 1) * each
            and max(self.top_tokens, default=0) < vocab_size
            and max(self.ranks, default=1) <= vocab_size
        )

    def at(self, index: int) -> tuple[float, int, list[tuple[int, float]]]:
        """Returns of one token its own, its rank, and the likeliest with theirs."""
        width = len(self.top) // len(self.logprobs)
        part = slice(index * width, (index + 1) * width)
        top = list(zip(self.top_tokens[part], self.top[part], strict=True))
        return self.logprobs[index], self.ranks[index], top


Logprobs = tuple[Logprob, ...]


class OutputLogprobs:
    """How likely the model found an output's tokens, append-only, with equally many likeliest at each. In
    arrays: objects would take fifteen times as much memory, and an output may be as long as a context."""

    def __init__(self) -> None:
        self._own, self._ids, self._top = array("f"), array("I"), array("f")

    def __len__(self) -> int:
        return len(self._own)

    def extend(self, more: Logprobs) -> None:
        for one in more:
            self._own.append(one.logprob)
            for token, logprob in one.top:
                self._ids.append(token)
                self._top.append(logprob)

    def part(self, start: int, end: int) -> Logprobs:
        """Returns those of the tokens from `start` up to `end`, counted from the first that it has."""
        width = len(self._top) // len(self._own) if self._own else 0
        of = slice(start * width, end * width)
        top = list(zip(self._ids[of], self._top[of], strict=True))
        return tuple(
            Logprob(own, tuple(top[index * width : (index + 1) * width]))
            for index, own in enumerate(self._own[start:end])
        )


Numbers = tuple[list[float], list[int], list[float]]
"""The log-probability of each token; then, equally many for each, the ids of the likeliest, one token's
after the other's, and their log-probabilities."""


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


def prompt_to_wire(told: PromptLogprobs) -> common_pb2.PromptLogprobs:
    return common_pb2.PromptLogprobs(
        logprobs=told.logprobs, ranks=told.ranks, top_tokens=told.top_tokens, top_logprobs=told.top
    )


def prompt_from_wire(message: common_pb2.PromptLogprobs) -> PromptLogprobs:
    """Returns numbers that may not fit each other: see `fits`."""
    return PromptLogprobs(
        array("f", message.logprobs),
        array("I", message.ranks),
        array("I", message.top_tokens),
        array("f", message.top_logprobs),
    )
