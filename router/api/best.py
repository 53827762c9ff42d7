"""The likeliest of several answers to a prompt: OpenAI's `best_of`. Pure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import replace

from router.api.logprobs import HeldScores
from router.api.output import Chunk, Result
from router.requests import SessionBegun
from router.tool_parser import joined

Items = AsyncGenerator[tuple[int, SessionBegun | Chunk | Result], None]


TOGETHER = 256  # tokens that are told at once


class _Candidate:
    """An answer until all are there."""

    def __init__(self, ends: Collection[int], hide_logprobs: bool) -> None:
        """`ends`: positions that are the end of a chunk."""
        self.result: Result | None = None
        self._ends = ends
        self._hide_logprobs = hide_logprobs
        self._chunks: list[Chunk] = []
        self._held: list[Chunk] = []  # since then, with `_scores`
        self._scores = HeldScores()
        self._sum = 0.0  # of its log-probabilities
        self._tokens = 0

    def add(self, chunk: Chunk) -> None:
        for one in chunk.scored:  # one by one: the sum is the same however the steps were cut
            self._sum += one.own.logprob
        self._tokens += len(chunk.scored)
        if not self._hide_logprobs:
            self._scores.extend(chunk.scored)
        self._held.append(chunk._replace(scored=()))
        if chunk.step is not None or len(self._held) == TOGETHER or chunk.position in self._ends:
            self._join()

    def chunks(self) -> list[Chunk]:
        if self._held:
            self._join()
        return self._chunks

    def _join(self) -> None:
        """A step is little, and what holds it is not: the steps of 64 long answers would be many."""
        held, scores = self._held, self._scores
        self._held, self._scores = [], HeldScores()
        calls = [call for one in held for call in one.calls]
        chunk = held[-1]._replace(
            text="".join(one.text for one in held),
            token_ids=tuple(token for one in held for token in one.token_ids),
            scored=scores,
            calls=joined(calls) if calls else (),
            reasoning="".join(one.reasoning for one in held),
        )
        self._chunks.append(chunk)

    @property
    def likelihood(self) -> float:
        """The log-probability a token."""
        return self._sum / max(self._tokens, 1)


async def likeliest(
    items: Items, of: int, told: int, after: Sequence[int] | None = None, *, hide_logprobs: bool = False
) -> Items:
    """The items of the answers that are told, once all are there: of each `of`, one prompt's, the `told` with
    the greatest log-probability a token, greatest first; of equals the earlier.

    `after`: of each that is told, the tokens that its client has. Raises what `items` raises, and the end of
    their time."""
    candidates: dict[int, _Candidate] = {}
    ends = frozenset(after or ())
    async with aclosing(items):
        async for index, item in items:
            if isinstance(item, SessionBegun):
                yield index, item
                continue
            one = candidates.setdefault(index, _Candidate(ends, hide_logprobs))
            if isinstance(item, Chunk):
                one.add(item)
            elif item.cut is not None:
                raise item.cut  # which are the likeliest is not known
            else:
                one.result = item
    index = 0
    for first in range(0, len(candidates), of):
        ranked = [candidates.pop(at) for at in range(first, first + of)]
        ranked.sort(key=lambda one: -one.likelihood)
        untold = tuple(one.result for one in ranked[told:] if one.result is not None)
        del ranked[told:]  # a client may take its time: no more is held than it is to be told
        while ranked:
            one = ranked.pop(0)
            for chunk in one.chunks():
                if chunk.position > (after[index] if after else 0):
                    yield index, chunk
                    await asyncio.sleep(0)  # they come at once, and other answers are streaming
            assert one.result is not None
            yield index, replace(one.result, untold=() if ranked else untold)
            index += 1
