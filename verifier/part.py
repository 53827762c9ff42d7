"""A session's share of a step: what of it runs, and which rows are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.engine.engine import Work
from outrider.grammar import Allowed
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

    def work(self) -> Work:
        log = self.running.session.log
        tokens = [*log[self.start : self.start + self.tokens], *self.path]
        return Work(self.running.table.blocks, self.start, tokens, len(self.path) + 1 if self.final else 0)

    def rows(self) -> list[Row]:
        if not self.final:
            return []
        running = self.running
        params, position = running.session.spec.params.sampling, len(running.session.log)
        after = [None, *self.path]
        if running.place is not None:
            return self._ruled(running.place.masks(self.path))
        if not params.penalized:  # then what stands before a row is of no account
            return [Row(params, position + j, None, (), token) for j, token in enumerate(after)]
        return [
            Row(params, position + j, running.counts, self.path[:j], token) for j, token in enumerate(after)
        ]

    def _ruled(self, allowed: Sequence[Allowed]) -> list[Row]:
        """Returns the rows of a session with a grammar."""
        running, path = self.running, self.path
        params, position = running.session.spec.params.sampling, len(running.session.log)
        return [
            Row(params, position + j, running.counts, path[:j], token, mask)
            for j, (token, mask) in enumerate(zip([None, *path], allowed, strict=True))
        ]
