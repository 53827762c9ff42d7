"""Guesses that the verifier itself has for a session: from the client's prediction, and from the grammar.

They stand in the session's draft tree beside what drafters send, and are priced, verified and counted like
that. They cost no message. Pure: what the grammar forces is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from outrider.wire.guesses import OwnCounts
from verifier.draft_tree import MAX_NODES, DraftTree
from verifier.nodes import Source

NEAR = 64  # tokens of a prediction around the expected one, where two equal tokens show the place again
FAR = 4096  # tokens around it, where more must be equal
LEAST_NEAR, LEAST_FAR = 2, 4
SKIPPED = 8  # tokens around it, where one shows the place, until more are known
COMPARED = 16  # tokens, to tell places apart
PLACES = 8  # that are looked at, on either side of the expected one
RETOLD = 256  # tokens of an output that was begun elsewhere: its place is found by the last of them
RUNS = (0, 1, 3, 8)  # tokens in a row that were right: from each number on it is another kind of guess
FIRST_CHANCES = (0.7, 0.8, 0.9, 0.95)  # of each kind, before any was seen
FORCED_CHANCE = 0.95  # of a forced token, before any was seen: the model may cut the same text otherwise
PRIOR = 1.0  # guesses that the first chances weigh as much as
FORGETTING = 0.95  # a guess of the same kind
LEAST_SURVIVAL = 0.2  # of a guess that is made


class Own(Enum):
    """Where a guess comes from: a source of the draft tree."""

    PREDICTION = "prediction"
    GRAMMAR = "grammar"


@dataclass(slots=True)
class Chance:
    """How often guesses of one kind were right lately."""

    right: float
    seen: float = PRIOR

    def observe(self, right: bool) -> None:
        self.right, self.seen = FORGETTING * self.right + right, FORGETTING * self.seen + 1

    @property
    def value(self) -> float:
        return self.right / self.seen


class Prediction:
    """A text that the output is expected to be, but for some changes: knows where in it the output is.

    At a difference it takes the token for one in the place of another, and goes on behind that. A match of
    the output's last tokens elsewhere shows the place again: nearby a short one, further off a longer one."""

    def __init__(self, tokens: Sequence[int], output: Sequence[int] = ()) -> None:
        """`output`: what there is already."""
        self._tokens = list(tokens)
        self._ids = np.asarray(self._tokens, np.int64)
        self._next = max(0, len(output) - RETOLD)  # place of the token that is expected
        self._run = 0  # tokens that were right, up to there
        self._chances = [Chance(PRIOR * chance) for chance in FIRST_CHANCES]
        self.follow(output, len(output) - self._next)

    def follow(self, log: Sequence[int], count: int) -> None:
        """Takes in that the log has got its last `count` tokens."""
        for end in range(len(log) - count, len(log)):
            token, place = log[end], self._next
            self._next += 1
            if place < len(self._tokens):
                right = self._tokens[place] == token
                self._chances[_kind(self._run)].observe(right)
                if right:
                    self._run += 1
                    continue
            self._run = 0
            self._find(log, end, place)

    def guesses(self, most: int) -> tuple[list[int], list[float]]:
        """Returns the tokens that are expected next, at most so many, and the chance of each to be right with
        all before it."""
        survival, chances = 1.0, list[float]()
        for run in range(self._run, self._run + min(most, len(self._tokens) - self._next)):
            survival *= self._chances[_kind(run)].value
            if survival < LEAST_SURVIVAL:
                break
            chances.append(survival)
        return self._tokens[self._next : self._next + len(chances)], chances

    def _find(self, log: Sequence[int], end: int, expected: int) -> None:
        """Looks for the place that is most like the log's end, of several for the nearest."""
        first = max(0, expected - FAR)
        found = first + np.flatnonzero(self._ids[first : expected + FAR] == log[end])
        middle = int(np.searchsorted(found, expected))
        best = (0, 0)  # (tokens that are equal, how near)
        for place in found[max(0, middle - PLACES) : middle + PLACES].tolist():
            off, equal, most = abs(place - expected), 1, min(COMPARED, place + 1, end + 1)
            while equal < most and log[end - equal] == self._tokens[place - equal]:
                equal += 1
            least = 1 if off <= SKIPPED else LEAST_NEAR if off <= NEAR else LEAST_FAR
            if equal >= least and (equal, -off) > best:
                best, self._next, self._run = (equal, -off), place + 1, equal - 1


def _kind(run: int) -> int:
    return sum(run >= least for least in RUNS) - 1


@dataclass(slots=True)
class OwnGuesses:
    """Those for one session."""

    prediction: Prediction | None
    _forced: list[int] = field(default_factory=list)  # by the grammar, as last asked
    _chance: Chance = field(default_factory=lambda: Chance(PRIOR * FORCED_CHANCE))

    @classmethod
    def of(cls, prediction: Sequence[int], ruled: bool, output: Sequence[int]) -> OwnGuesses | None:
        """Returns those for a session with so much output; None if there are none. `ruled`: by a grammar."""
        if not prediction and not ruled:
            return None
        return cls(Prediction(prediction, output) if prediction else None)

    def follow(self, log: Sequence[int], count: int) -> None:
        """Takes in that the log has got its last `count` tokens."""
        if self.prediction is not None:
            self.prediction.follow(log, count)
        for token, forced in zip(log[len(log) - count :], self._forced, strict=False):
            self._chance.observe(token == forced)
            if token != forced:
                break
        self._forced = []

    def add_to(self, tree: DraftTree, most: int, forced: Sequence[int]) -> None:
        """Adds guesses to the tree, at most so many of each kind. `forced`: tokens that the grammar leaves no
        choice of."""
        most = min(most, MAX_NODES)
        self._forced = list(forced[:most])
        chances = [self._chance.value ** (depth + 1) for depth in range(len(self._forced))]
        chances = [chance for chance in chances if chance >= LEAST_SURVIVAL]
        _add(tree, self._forced[: len(chances)], chances, Own.GRAMMAR)
        if self.prediction is not None:
            _add(tree, *self.prediction.guesses(most), Own.PREDICTION)


def _add(tree: DraftTree, tokens: Sequence[int], survival: Sequence[float], source: Own) -> None:
    if tokens:
        tree.add([], list(tokens), (), bytes(round(255 * chance) for chance in survival), source)


def counts(said: Mapping[Source, Sequence[float | None]], path: Sequence[int], accepted: int) -> OwnCounts:
    """Returns how many of a step's draft tokens each kind had guessed. `said`: as of Nodes; `path`: the nodes
    that took part, one behind the other, of which the first `accepted` were right."""

    def count(kind: Own) -> int:
        each = said.get(kind, ())
        return sum(node < len(each) and each[node] is not None for node in path)

    predicted, forced = count(Own.PREDICTION), count(Own.GRAMMAR)
    return OwnCounts(predicted, min(predicted, accepted), forced, min(forced, accepted))
