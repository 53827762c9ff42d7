"""One session as the verifier sees it: the committed log, the drafts beyond it, what a step makes of them.

Pure: no clock, no I/O, no torch. KV blocks are held beside it as integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from outrider.wire.guesses import NO_OWN, DrafterCounts, Guesses, OwnCounts
from outrider.wire.logprobs import Logprobs
from outrider.wire.session import FinishReason, SessionParams
from outrider.wire.trace_context import TraceContext
from verifier.draft_tree import MAX_NODES, DraftTree
from verifier.nodes import Nodes, Source

MAX_BEHIND = 1024  # committed tokens that a draft is compared with: who is further behind has been away


LEAST_SURVIVAL = 0.05  # of a draft token that is verified though its source is doubted
NO_BRANCH = 2.0  # a survival that no draft token has


class DraftFate(Enum):
    """What became of a Draft message; everything but TAKEN is counted under its name."""

    TAKEN = "taken"
    RESTING = "resting"  # none are taken for now
    STALE = "stale"  # differs from what was committed since, or lies wholly before it, or was known
    AHEAD = "ahead"  # starts beyond the log: before it was opened anew the session may have been there
    BEYOND = "beyond"  # starts beyond the end that was asked for: nobody can know that
    BEFORE_OUTPUT = "before_output"  # guesses at the prompt
    BAD_TOKEN = "bad_token"  # an id outside the vocabulary
    TOO_LONG = "too_long"  # more tokens than a session's tree could hold
    BAD_TREE = "bad_tree"  # parents or survival that do not fit the tokens


class Outcome(NamedTuple):
    """What one step fixed for a session."""

    base: int  # position of tokens[0]
    tokens: tuple[int, ...]
    accepted: int  # of them, drafted ones
    verified: (
        int  # draft tokens that took part, of the path that the target followed and what stood behind it
    )
    finish: FinishReason | None
    logprobs: Logprobs = ()  # of the tokens, if asked for
    guesses: Guesses = ()  # of `verified`, if asked for
    beside: int = 0  # draft tokens that took part beside those
    followed: tuple[int, ...] = ()  # the accepted ones, by their index among the step's
    own: OwnCounts = NO_OWN  # of `verified`
    drafters: tuple[DrafterCounts, ...] = ()  # of all that took part, if it has several


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """A session as it was opened."""

    session_id: bytes
    params: SessionParams
    output: tuple[int, ...]  # committed elsewhere before
    vocab_size: int
    draft_key: bytes
    trace: TraceContext | None = None  # to which belongs what is done for it


class Session:
    def __init__(self, spec: SessionSpec, num_speculative_tokens: int) -> None:
        self.spec = spec
        self.num_speculative_tokens = num_speculative_tokens
        self.resting = False  # nothing of drafters is taken for now
        self.log: list[int] = [*spec.params.prompt, *spec.output]
        self.tree = DraftTree()
        self._stop_token_ids = frozenset(spec.params.stop_token_ids)
        self.first_sampling = spec.params.first_sampling
        self._full = spec.params.most_tokens  # length of the log at which it is over

    @property
    def output_length(self) -> int:
        return len(self.log) - len(self.spec.params.prompt)

    @property
    def room(self) -> int:
        """Returns how many output tokens may still come."""
        return self._full - len(self.log)

    def continues(self, spec: SessionSpec) -> bool:
        """Returns whether it is what a session that is opened so would be: the same request, and a log that
        begins with what the opener knows."""
        known = tuple(self.log[len(spec.params.prompt) :][: len(spec.output)])
        return self.spec.params == spec.params and known == spec.output

    def offer(
        self,
        base: int,
        tokens: list[int],
        parents: Sequence[int],
        survival: bytes,
        source: Source = None,
    ) -> DraftFate:
        """Takes a Draft message in, from a peer that is not trusted. `source`: the seat that it came by."""
        behind = len(self.log) - base
        if behind < 0:
            end = len(self.spec.params.prompt) + self.spec.params.max_tokens
            return DraftFate.AHEAD if base <= end else DraftFate.BEYOND
        if base < len(self.spec.params.prompt):
            return DraftFate.BEFORE_OUTPUT
        count = len(tokens)
        if behind > MAX_BEHIND:
            return DraftFate.STALE
        if count > MAX_NODES + behind:
            return DraftFate.TOO_LONG
        if (parents and len(parents) != count) or (survival and len(survival) != count):
            return DraftFate.BAD_TREE
        if parents and any(not -1 <= parent < index for index, parent in enumerate(parents)):
            return DraftFate.BAD_TREE
        if tokens and max(tokens) >= self.spec.vocab_size:
            return DraftFate.BAD_TOKEN
        if behind >= count:
            return DraftFate.STALE
        if self.resting:
            return DraftFate.RESTING
        added = self.tree.add(self.log[base:], tokens, parents, survival, source)
        return DraftFate.TAKEN if added else DraftFate.STALE

    @property
    def wanted(self) -> int:
        """Returns the most draft tokens to verify now: the last output token is always the target's own."""
        return min(self.num_speculative_tokens, self.room - 1)

    def rest(self, resting: bool) -> None:
        """Takes nothing of drafters from now on, or takes it again. What they said is forgotten: it will be
        old when they are heard again. What the verifier itself guesses is added with the next commit."""
        self.resting, self.tree = resting, DraftTree()

    def nodes(self, least: float = NO_BRANCH) -> Nodes:
        """Returns the draft tokens that may be verified now: the likeliest path, and beside it what survives
        with `least` at least. Each chance counts as far as its seat is believed. Of who is doubted what
        hardly survives is left out, whatever a row costs; so is what stands behind a token that ends the
        session."""
        tree, wanted, survival = self.tree, self.wanted, 1.0
        believed = tree.believed(wanted)
        if not self._stop_token_ids.isdisjoint(tree.path):
            del believed[self._first_stop(tree.path) + 1 :]
        for count, chance in enumerate(believed):
            survival *= chance
            if survival < LEAST_SURVIVAL and tree.doubted(count):
                del believed[count:]
                break
        return tree.nodes(believed, wanted, least)

    def _first_stop(self, tokens: Sequence[int]) -> int:
        """Returns the index of the first that ends the session; there must be one."""
        return next(index for index, token in enumerate(tokens) if token in self._stop_token_ids)

    def verify(
        self,
        nodes: Nodes,
        chosen: Sequence[int],
        known: Sequence[bool] | None = None,
        followed: list[int] | None = None,
    ) -> Outcome:
        """Appends what the target chose: `chosen[0]` follows the log, and `chosen[1 + i]` node i, if that is
        `known`.

        From the log's end on the nodes are accepted that are the target's tokens, one behind the other; where
        there is none stands the target's own. `followed`: those, if they are known already.
        """
        if followed is None:
            followed = nodes.follow(chosen, known)
        room = self.room
        if nodes.is_path:
            tokens = list(chosen[: min(1 + len(followed), room)])
        else:
            tokens = [chosen[0], *(chosen[1 + node] for node in followed)][:room]
        finish = FinishReason.LENGTH if len(tokens) == room else None
        if not self._stop_token_ids.isdisjoint(tokens):
            tokens, finish = tokens[: self._first_stop(tokens) + 1], FinishReason.STOP
        base = len(self.log)
        self.log.extend(tokens)
        self.tree.advance(tokens)
        accepted = min(len(followed), len(tokens))
        verified, beside = len(nodes.tokens), 0
        if known is not None or not nodes.is_path:
            beyond = [node for node in nodes.beyond(followed) if known is None or known[1 + node]]
            verified = len(followed) + len(beyond)
            beside = (len(chosen) if known is None else sum(known)) - 1 - verified
        return Outcome(
            base,
            tuple(tokens),
            accepted,
            verified,
            finish,
            beside=beside,
            followed=tuple(followed[:accepted]),
        )
