"""A session's share of a step: what of it runs, and which rows are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.engine.engine import Work
from outrider.grammar import Allowed
from outrider.sampling.logprobs import PromptRows
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row
from verifier.draft_tree import Source

if TYPE_CHECKING:
    from verifier.running import Running


@dataclass(slots=True, eq=False)
class Part:
    """What runs of a session in one step: committed tokens that are not in the cache yet, then drafts."""

    running: Running
    start: int  # tokens in the cache before
    tokens: int  # committed tokens that run
    path: list[int]  # draft tokens that follow them
    said: Mapping[Source, Sequence[float]]  # by seat: what it promised of the first of those
    final: bool  # whether the log's last token is among them, so that a token is drawn
    scored: int = 0  # of the tokens, those before the last row whose logits its prompt waits for

    def work(self) -> Work:
        log = self.running.session.log
        tokens = [*log[self.start : self.start + self.tokens], *self.path]
        rows = self.scored + (len(self.path) + 1 if self.final else 0)
        return Work(self.running.table.blocks, self.start, tokens, rows)

    def prompt_rows(self, first: int) -> PromptRows:
        """Returns the rows that its prompt's own tokens follow, the first of which is the step's `first`."""
        params, end = self.running.session.spec.params, self.start + self.tokens + (not self.final)
        count = params.prompt_logprobs
        assert count is not None
        return PromptRows(first, params.prompt[end - self.scored : end], count)

    def rows(self) -> list[Row]:
        if not self.final:
            return []
        running = self.running
        params, position = running.session.spec.params.sampling, len(running.session.log)
        after = [None, *self.path]
        if running.place is not None:
            return self._ruled(running.place.masks(self.path))
        session = running.session
        if session.first_sampling is not None and session.output_length < session.spec.params.min_tokens:
            return self._first(session.first_sampling)
        if not params.penalized:  # then what stands before a row is of no account
            return [Row(params, position + j, None, (), token) for j, token in enumerate(after)]
        return [
            Row(params, position + j, running.counts, self.path[:j], token) for j, token in enumerate(after)
        ]

    def _first(self, first: SamplingParams) -> list[Row]:
        """Returns the rows of a session that may not end yet."""
        running, path = self.running, self.path
        params, position = running.session.spec.params, len(running.session.log)
        least = len(params.prompt) + params.min_tokens
        return [
            Row(
                first if position + j < least else params.sampling,
                position + j,
                running.counts,
                path[:j],
                token,
            )
            for j, token in enumerate([None, *path])
        ]

    def _ruled(self, allowed: Sequence[Allowed]) -> list[Row]:
        """Returns the rows of a session with a grammar."""
        running, path = self.running, self.path
        params, position = running.session.spec.params.sampling, len(running.session.log)
        return [
            Row(params, position + j, running.counts, path[:j], token, mask)
            for j, (token, mask) in enumerate(zip([None, *path], allowed, strict=True))
        ]
