"""The draft tokens that a step verified, as who asked for them is told: plain data, and messages of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from outrider.v1 import common_pb2


class Guess(NamedTuple):
    """Of the token at a position."""

    token: int
    chance: float  # of being accepted if all before it are: as its drafter said, 0..1
    drafter: str  # worker_id of who had guessed it


Guesses = tuple[Guess, ...]


def guesses_to_wire(guesses: Iterable[Guess]) -> list[common_pb2.Guess]:
    return [common_pb2.Guess(token=one.token, chance=one.chance, drafter=one.drafter) for one in guesses]


def guesses_from_wire(messages: Iterable[common_pb2.Guess]) -> Guesses:
    return tuple(Guess(one.token, one.chance, one.drafter) for one in messages)
