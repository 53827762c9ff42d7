"""Where the tokens of an output came from, step by step, for who asks with `return_speculation`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from outrider.wire.guesses import Guess
from router.api.logprobs import piece_text
from router.requests import TokensCommitted


class Source(IntEnum):
    """Who chose a token first; the values are outrider.v1.Source's."""

    ACCEPTED = 1  # a drafter had guessed it
    CORRECTION = 2  # the target's own in the place of a wrong guess
    BONUS = 3  # the target's own after guesses that were all right
    PLAIN = 4  # the target's own in a step without guesses


@dataclass(frozen=True, slots=True)
class Guessed:
    """A token, and who had guessed it."""

    token_id: int
    piece: bytes  # of the text; empty for a token that ends it
    guess: Guess | None = None

    def as_json(self) -> dict[str, object]:
        return {
            "token": piece_text(self.piece),
            "bytes": list(self.piece),
            "drafter": None if self.guess is None else self.guess.drafter,
            "probability": None if self.guess is None else self.guess.chance,
        }


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the target, as far as its tokens are told."""

    index: int  # from 0
    seconds: float | None  # since the answer was begun; None = only the session's log tells of it
    drafted: int  # draft tokens verified
    accepted: int  # of them, right ones
    tokens: tuple[tuple[Source, Guessed], ...]
    rejected: Guessed | None  # in whose place the target took another

    def as_json(self) -> dict[str, object]:
        return {
            "step": self.index,
            "seconds": self.seconds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tokens": [{**token.as_json(), "source": source.name.lower()} for source, token in self.tokens],
            "rejected": None if self.rejected is None else self.rejected.as_json(),
        }


def steps_json(steps: Sequence[Step]) -> dict[str, object]:
    """Returns the object `speculation` of a choice."""
    return {"steps": [step.as_json() for step in steps]}


class Provenance:
    """Where the tokens of one output came from."""

    def __init__(self, token_bytes: Callable[[int], bytes], end_ids: frozenset[int]) -> None:
        """`end_ids`: tokens that end the text and are no part of it."""
        self._token_bytes = token_bytes
        self._end_ids = end_ids
        self._steps = 0

    def push(self, event: TokensCommitted, first: int, end: int) -> Step:
        """Returns what is told of a step of which the client gets the tokens `first` to `end`."""
        tokens = tuple(self._of(event, place) for place in range(first, end))
        wrong = event.guesses[event.accepted] if event.accepted < len(event.guesses) else None
        told_to_its_end = end == len(event.tokens) == event.accepted + 1
        rejected = None if wrong is None or not told_to_its_end else self._guessed(wrong.token, wrong)
        self._steps += 1
        drafted = event.verified + event.beside
        return Step(self._steps - 1, event.seconds, drafted, event.accepted, tokens, rejected)

    def _of(self, event: TokensCommitted, place: int) -> tuple[Source, Guessed]:
        token = event.tokens[place]
        if place < event.accepted:
            guess = event.guesses[place] if place < len(event.guesses) else None
            return Source.ACCEPTED, self._guessed(token, guess)
        if not event.verified:
            return Source.PLAIN, self._guessed(token)
        source = Source.BONUS if event.accepted == event.verified else Source.CORRECTION
        return source, self._guessed(token)

    def _guessed(self, token: int, guess: Guess | None = None) -> Guessed:
        return Guessed(token, b"" if token in self._end_ids else self._token_bytes(token), guess)
