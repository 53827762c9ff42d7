"""Workers that are alike, of which a few can be drawn whatever their number."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Below = Callable[[int], int]
"""Draws a whole number from 0 up to, and without, the one given."""


def drawn(seed: int | None = None) -> Below:
    """Draws what is no secret: a third of what `random.randrange` costs, and for so few numbers as even.
    `seed`: always the same ones."""
    chance = random.Random(seed).random
    return lambda count: int(chance() * count)


T = TypeVar("T")


class Pool(Generic[T]):
    """Adding, taking out and drawing cost the same however many there are."""

    def __init__(self) -> None:
        self._members: list[T] = []
        self._places: dict[T, int] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[T]:
        return iter(self._members)

    def add(self, member: T) -> None:
        self._places[member] = len(self._members)
        self._members.append(member)

    def remove(self, member: T) -> None:
        """The last one takes its place."""
        place, last = self._places.pop(member), self._members.pop()
        if last is not member:
            self._members[place] = last
            self._places[last] = place

    def draw(self, most: int, below: Below) -> list[T]:
        """Returns so many different ones at random, each as likely as any other; all, if they are fewer.

        Floyd's algorithm (Bentley, "Programming pearls: a sample of brilliance", 1987)."""
        count = len(self._members)
        if count <= most:
            return list(self._members)
        drawn: dict[int, None] = {}
        for last in range(count - most, count):
            place = below(last + 1)
            drawn[last if place in drawn else place] = None
        return [self._members[place] for place in drawn]


K = TypeVar("K")


class Pools(Generic[K, T]):
    """Pools by what their members have in common."""

    def __init__(self) -> None:
        self._pools: dict[K, Pool[T]] = {}

    def __iter__(self) -> Iterator[K]:
        return iter(self._pools)

    def __getitem__(self, key: K) -> Pool[T]:
        """Returns an empty one if there are no such members."""
        return self._pools.get(key) or Pool()

    def add(self, key: K, member: T) -> None:
        self._pools.setdefault(key, Pool()).add(member)

    def remove(self, key: K, member: T) -> None:
        self._pools[key].remove(member)
        if not self._pools[key]:
            del self._pools[key]
