"""A session's share of a step: what of it runs, and which rows are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.engine import Work
from outrider.grammar import Allowed
from outrider.sampling.logprobs import PromptRows
from outrider.sampling.sampler import Row
from verifier.nodes import Nodes
from verifier.running import Moves, Running


@dataclass(slots=True, eq=False)
class Part:
    """What runs of a session in one step: committed tokens that are not in the cache yet, then drafts."""

    running: Running
    start: int  # tokens in the cache before
    tokens: int  # committed tokens that run
    nodes: Nodes  # draft tokens that follow them, in chains
    final: bool  # whether the log's last token is among them, so that a token is drawn
    places: tuple[int, ...] = ()  # where the nodes stand, if they are no path
    scored: int = 0  # of the tokens, those before the last row whose logits its prompt waits for

    @property
    def drafts(self) -> int:
        return len(self.nodes.tokens)

    @property
    def drawn(self) -> int:
        """Returns how many rows are drawn."""
        return self.drafts + 1 if self.final else 0

    def work(self) -> Work:
        running, nodes = self.running, self.nodes
        tokens = [*running.session.log[self.start : self.start + self.tokens], *nodes.tokens]
        parents = () if nodes.is_path else tuple(nodes.parents)
        moves, rows = running.take_moves(), self.scored + self.drawn
        return Work(running.table.blocks, self.start, tokens, rows, parents, self.places, moves)

    def moves(self, followed: Sequence[int], block_size: int) -> tuple[int, Moves]:
        """Returns how many of the accepted nodes stand where they belong, and the slots between which the
        others are to be moved."""
        if not self.places:
            return len(followed), ()
        first, blocks = self.start + self.tokens, self.running.table.blocks

        def slot(place: int) -> int:
            return blocks[place // block_size] * block_size + place % block_size

        stand = [self.places[node] for node in followed]
        lying = sum(place == first + depth for depth, place in enumerate(stand))
        away = range(lying, len(stand))
        return lying, tuple((slot(stand[depth]), slot(first + depth)) for depth in away)

    def prompt_rows(self, first: int) -> PromptRows:
        """Returns the rows that its prompt's own tokens follow, the first of which is the step's `first`."""
        params, end = self.running.session.spec.params, self.start + self.tokens + (not self.final)
        count = params.prompt_logprobs
        assert count is not None
        return PromptRows(first, params.prompt[end - self.scored : end], count)

    def rows(self) -> list[Row]:
        if not self.final:
            return []
        running, nodes, session = self.running, self.nodes, self.running.session
        params, position, history = session.spec.params, len(session.log), running.counts
        sampling, first, least = params.sampling, session.first_sampling, 0
        if first is not None and running.place is None:  # it may not end before
            least = len(params.prompt) + params.min_tokens
        # A row is needed only if the one before it draws its token; a branch's first one always counts.
        after: list[int | None] = [None]
        if nodes.is_path:
            after += nodes.tokens
            at: Sequence[int] = range(position, position + len(after))
        else:
            after += [token if follows else None for token, follows in nodes.in_line]
            at = [position, *(position + 1 + depth for depth in nodes.depths)]
        if not params.sampling.penalized and running.place is None and position >= least:
            return [Row(sampling, place, None, (), token) for place, token in zip(at, after, strict=True)]
        allowed: Sequence[Allowed | None] = [None] * len(at)
        if running.place is not None:
            allowed = running.place.masks(nodes.tokens, parents=nodes.parents)
        behind = zip(at, [[], *nodes.paths], after, allowed, strict=True)
        return [
            Row(
                first if first is not None and place < least else sampling,
                place,
                history,
                drafted,
                token,
                mask,
            )
            for place, drafted, token, mask in behind
        ]
