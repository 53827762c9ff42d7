"""Nineteen kinds of hostile drafter: what each sends when it hears what a target has committed. Pure.

Each knows the target's text in advance, so that it can be right where that does most harm.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from outrider.wire.speculation import Draft

K = 8  # tokens of a draft


@dataclass(frozen=True)
class Text:
    """The target's text of a session."""

    truth: Callable[[int], int]  # its token at a position
    vocab: int
    start: int  # length of the prompt

    def wrong(self, position: int) -> int:
        return (self.truth(position) + 3) % self.vocab

    def path(self, base: int, good: int, count: int = K) -> list[int]:
        """Tokens of which the first `good` are right."""
        return [(self.truth if place < good else self.wrong)(base + place) for place in range(count)]


@dataclass(frozen=True)
class Said:
    tokens: list[int]
    parents: tuple[int, ...] = ()
    survival: bytes = b""  # empty = certain
    base: int | None = None  # another than the log's end
    late: float | None = None  # steps after the commit that it follows; None = it is there before the next
    times: int = 1
    session_id: bytes | None = None  # None = its own


Kind = Callable[[Text, int, int, random.Random], Said | None]
"""What a drafter says after a commit: by the log's length after the next one, of one token, and the number of
commits before."""


def full_tree(text: Text, rng: random.Random) -> Said:
    return Said(
        [rng.randrange(text.vocab) for _ in range(250)], tuple(rng.randrange(-1, at) for at in range(250))
    )


def soon(text: Text, base: int, good: int, late: float = 0.1) -> Said:
    """Two tokens that are of use only to a step that waits for them."""
    return Said(text.path(base - 1, good, 2), late=late)


KINDS: dict[str, Kind] = {
    "empty drafts for sessions of nobody": lambda text, base, _, rng: Said([], session_id=rng.randbytes(16)),
    "empty drafts for its own": lambda *_: Said([], times=20),
    "silence": lambda *_: None,
    "answers and then silence": lambda text, base, step, _: soon(text, base, K) if step < 300 else None,
    "answers now and then": lambda text, base, step, _: (
        Said(text.path(base, 1, 1)) if step // 8 % 2 else None
    ),
    "all wrong": lambda text, base, *_: Said(text.path(base, 0)),
    "off by one": lambda text, base, *_: Said([(text.truth(base + at) + 1) % text.vocab for at in range(K)]),
    "a place too far": lambda text, base, *_: Said([text.truth(base + at + 1) for at in range(K)]),
    "the wrong tail": lambda text, base, *_: Said(text.path(base, 1)),
    "the wrong tail after three": lambda text, base, *_: Said(text.path(base, 3)),
    "random full trees": lambda text, base, _, rng: full_tree(text, rng),
    "wrong branches beside the right one": lambda text, base, *_: Said(
        [*text.path(base, K), *text.path(base, 0)], (*range(-1, K - 1), -1, *range(K, 2 * K - 1))
    ),
    "wrong, and modest": lambda text, base, *_: Said(text.path(base, 0), survival=bytes([128] * K)),
    "the same again and again": lambda text, base, *_: Said(text.path(base, 0), times=20),
    "what is over": lambda text, base, *_: Said(
        text.path(base - K - 2, K), base=max(text.start, base - K - 2)
    ),
    "soon and late by turns": lambda text, base, step, _: soon(text, base, 1, 0.1 if step % 2 else 0.45),
    "soon, and right and wrong by turns": lambda text, base, step, _: soon(text, base, step // 20 % 2),
    "right and wrong by turns": lambda text, base, step, _: Said(text.path(base, K if step // 20 % 2 else 0)),
    "just below the limit": lambda text, base, step, _: Said(
        text.path(base, 0) if step % 50 else [text.vocab]
    ),
}


def drafts(
    kind: Kind, text: Text, session_id: bytes, end: int, step: int, rng: random.Random
) -> list[tuple[float, Draft]]:
    """Returns what is sent when so many tokens of a session are committed, each with the steps to wait before
    it: what is late comes token by token."""
    said, base = kind(text, end + 1, step, rng), end
    if said is None:
        return []
    if said.base is not None:
        base = said.base
    elif said.late is None and said.tokens:
        said = _after_the_next(text, end, said)
    whose = session_id if said.session_id is None else said.session_id
    if said.late is None:
        return [(0.0, Draft(whose, base, said.tokens, said.parents, said.survival))] * said.times
    return [
        (said.late + 0.05 * at, Draft(whose, base, said.tokens[: at + 1], said.parents, said.survival))
        for at in range(len(said.tokens))
    ]


def _after_the_next(text: Text, base: int, said: Said) -> Said:
    """A step is under way and commits a token: what is said begins with that, and is there for the next."""
    parents = (-1, *(parent + 1 for parent in said.parents)) if said.parents else ()
    survival = bytes([255]) + said.survival if said.survival else b""
    return replace(said, tokens=[text.truth(base), *said.tokens], parents=parents, survival=survival)
