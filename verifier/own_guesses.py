"""Guesses that the verifier itself has for a session: from the client's prediction, and from the grammar,
with what the text did before where that leaves little choice. Those of a speculator are in
speculator_guesses.py.

They stand in the session's draft tree beside what drafters send, and are priced, verified and counted like
that. They cost no message. Pure: what the grammar allows is given.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from operator import mul

import numpy as np

from outrider.grammar import Choose
from outrider.grammar_matcher import Mask
from outrider.wire.guesses import OwnCounts
from outrider.wire.session import SessionParams
from verifier.chance import Chance
from verifier.draft_tree import MAX_NODES, DraftTree
from verifier.habit import Habit
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
LEAST_SURVIVAL = 0.2  # of a guess that is made

Likely = Callable[[int, Choose], list[tuple[int, bool]]]
"""Finds the next tokens, at most so many, as far as a grammar leaves no choice of them or what it is given
knows one; and of each whether it was chosen."""


class Own(Enum):
    """Where a guess comes from: a source of the draft tree."""

    PREDICTION = "prediction"
    GRAMMAR = "grammar"
    SPECULATOR = "speculator"


class Prediction:
    """A text that the output is expected to be, but for some changes: knows where in it the output is.

    At a difference it takes the token for one in the place of another, and goes on behind that. A match of
    the output's last tokens elsewhere shows the place again: nearby a short one, further off a longer one."""

    def __init__(self, tokens: Sequence[int], output: Sequence[int] = ()) -> None:
        """`output`: what there is already."""
        self._tokens = tokens if isinstance(tokens, array) else array("I", tokens)  # the session's own
        self._ids = np.asarray(self._tokens)  # the same memory
        self._next = max(0, len(output) - RETOLD)  # place of the token that is expected
        self._run = 0  # tokens that were right, up to there
        self._chances = [Chance.first(chance) for chance in FIRST_CHANCES]
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
        return self._tokens[self._next : self._next + len(chances)].tolist(), chances

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
    """A verifier's own guesses for one session."""

    prediction: Prediction | None
    habit: Habit | None  # None = it has no grammar
    _told: list[tuple[int, Chance]] = field(default_factory=list)  # by the grammar and habit, as last asked
    _survival: float = 1.0  # of what was chosen
    _forced: Chance = field(default_factory=lambda: Chance.first(FORCED_CHANCE))

    @classmethod
    def of(cls, params: SessionParams, output: Sequence[int]) -> OwnGuesses | None:
        """Returns those for a session with so much output; None if there are none."""
        if not params.prediction and not params.grammar:
            return None
        return cls(
            Prediction(params.prediction, output) if params.prediction else None,
            Habit(params.prompt, output) if params.grammar else None,
        )

    def follow(self, log: Sequence[int], count: int) -> None:
        """Takes in that the log has got its last `count` tokens."""
        if self.prediction is not None:
            self.prediction.follow(log, count)
        for token, (told, chance) in zip(log[len(log) - count :], self._told, strict=False):
            chance.observe(token == told)
            if token != told:
                break
        self._told = []
        if self.habit is not None:
            self.habit.follow(log, count)

    def add_to(self, tree: DraftTree, most: int, likely: Likely | None) -> None:
        """Adds guesses to the tree, at most so many of each kind. `likely`: of its place in a grammar."""
        most = min(most, MAX_NODES)
        if self.habit is not None and likely is not None and most > 0:
            self._told, self._survival, before, chances = [], 1.0, None, list[float]()
            for token, chosen in likely(most, self._choose):
                chance = self.habit.chance(before, token) if chosen else self._forced
                self._told.append((token, chance))
                chances.append(chance.value)
                before = token
            chances = [chance for chance in accumulate(chances, mul) if chance >= LEAST_SURVIVAL]
            add_guesses(tree, [token for token, _ in self._told[: len(chances)]], chances, Own.GRAMMAR)
        if self.prediction is not None:
            add_guesses(tree, *self.prediction.guesses(most), Own.PREDICTION)

    def _choose(self, before: int | None, mask: Mask) -> int | None:
        """Returns what is likely, as far as what was chosen before it survives."""
        assert self.habit is not None
        if self._survival < LEAST_SURVIVAL:
            return None
        token = self.habit.choose(before, mask)
        if token is not None:
            self._survival *= self.habit.chance(before, token).value
        return token


def add_guesses(
    tree: DraftTree,
    tokens: Sequence[int],
    survival: Sequence[float],
    source: Own,
    parents: Sequence[int] = (),
) -> None:
    """Adds tokens, each with the chance to be right with all before it. `parents`: see DraftTree.add."""
    if tokens:
        tree.add([], list(tokens), parents, bytes(round(255 * chance) for chance in survival), source)


def counts(said: Mapping[Source, Sequence[float | None]], path: Sequence[int], accepted: int) -> OwnCounts:
    """Returns how many of a step's draft tokens each kind had guessed. `said`: as of Nodes; `path`: the nodes
    that took part, one behind the other, of which the first `accepted` were right."""

    def count(kind: Own) -> int:
        each = said.get(kind, ())
        return sum(node < len(each) and each[node] is not None for node in path)

    found = [count(kind) for kind in (Own.PREDICTION, Own.GRAMMAR, Own.SPECULATOR)]
    return OwnCounts(*(number for each in found for number in (each, min(each, accepted))))
