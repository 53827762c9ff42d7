"""One session as the drafter sees it: the committed log as far as it is known, and the guesses beyond it.

Pure: no clock, no I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.sampling.params import SamplingParams


class LogConflict(Exception):
    """A commit contradicts an earlier one: its verifier does not keep an append-only log."""


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """A session as it was opened."""

    session_id: bytes
    prompt: tuple[int, ...]
    output: tuple[int, ...]  # committed so far
    sampling: SamplingParams
    max_tokens: int  # most output tokens
    draft_key: bytes
    target_vocab_size: int


class DraftSession:
    def __init__(self, spec: DraftSpec, window: int) -> None:
        self.spec = spec
        self.window = window
        self.log: list[int] = [*spec.prompt, *spec.output]
        self.drafted: list[int] = []  # the unverified path beyond the log

    @property
    def length(self) -> int:
        """Tokens of the log and the draft together."""
        return len(self.log) + len(self.drafted)

    @property
    def wants_token(self) -> bool:
        """Whether one more guess is of use: the last output token is always the target's own."""
        last = len(self.spec.prompt) + self.spec.max_tokens - 1
        return len(self.drafted) < self.window and self.length < last

    def uncached(self, cached: int) -> list[int]:
        """The tokens of log and draft from position `cached` on."""
        start = cached - len(self.log)
        return self.drafted[start:] if start >= 0 else self.log[cached:] + self.drafted

    def extend(self, token: int) -> None:
        self.drafted.append(token)

    def apply(self, base: int, tokens: Sequence[int]) -> int:
        """Takes a commit in; returns how many positions of the old log and draft still stand.

        What was drafted and is confirmed moves into the log; at the first difference the rest of the draft is
        dropped. A commit that starts beyond the log (one before it was lost) changes nothing: the next
        acknowledgement tells the verifier where to start. Raises LogConflict where it contradicts the log.
        """
        known = len(self.log) - base
        if known < 0:
            return self.length
        if list(tokens[:known]) != self.log[base : base + len(tokens)]:
            raise LogConflict(f"the commit at position {base} contradicts the log")
        news = list(tokens[known:])
        agreed = 0
        while agreed < min(len(news), len(self.drafted)) and news[agreed] == self.drafted[agreed]:
            agreed += 1
        standing = len(self.log) + agreed
        if agreed == len(news):
            self.drafted = self.drafted[agreed:]
            standing += len(self.drafted)
        else:
            self.drafted = []
        self.log.extend(news)
        return standing
