"""Drafts that are trees: where in a session's slots each token stands, and which others it sees. Pure.

Tokens that follow one another from the first on are the line: each stands at its position. The others are on
branches. They stand behind the line, and behind what is before them on their branch; what else stands there
they do not see. A masked key leaves a sum as it is, but not the order in which its terms are added: kernels
go through keys by blocks, through those by panels, and through these by so many at a time. So a token stands
where its turn comes as it would at its position, in the same panel, and gets the bits of a text that goes on
so. How many keys are a panel is measured (invariance.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

KEY_BLOCK = 512  # keys that torch's CPU attention kernel goes through at a time
PANELS = (512, 384, 256, 192, 128, 64)  # of them, as many as a product may add up at a time
TURN = 16  # of them, those that are added up beside one another, at most

Ints = npt.NDArray[np.int64]
# From the position from which on a session's tokens run in the step, that of the tree's first token, and the
# tree, to the places of its tokens; None = there is none for it.
LayOut = Callable[[int, int, Sequence[int]], list[int | None]]


def depths(parents: Sequence[int]) -> list[int]:
    """Returns of each token of a tree how many of the tree are before it. `parents` are indices, -1 = what is
    before the tree."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def line_of(parents: Sequence[int]) -> int:
    """Returns how many of a tree's first tokens follow one another."""
    return next((index for index, parent in enumerate(parents) if parent != index - 1), len(parents))


def lay_out(panel: int, _start: int, position: int, parents: Sequence[int]) -> list[int | None]:
    """Returns the places of a tree's tokens, as LayOut does, by the number of keys of a panel."""

    def panel_of(place: int) -> tuple[int, int]:
        return place // KEY_BLOCK, place % KEY_BLOCK // panel

    line = line_of(parents)
    places: list[int | None] = list(range(position, position + line))
    taken = set[int]()
    for depth, parent in zip(depths(parents)[line:], parents[line:], strict=True):
        at, before = position + depth, places[parent] if parent >= line else position + line - 1
        if before is None:
            places.append(None)
            continue
        place = before + 1 + (at - before - 1) % TURN
        while place in taken:
            place += TURN
        taken.add(place)
        places.append(place if panel_of(place) == panel_of(at) else None)
    return places


def lay_out_in_order(_start: int, position: int, parents: Sequence[int]) -> list[int | None]:
    """Returns the places of a tree's tokens, as LayOut does, if a kernel adds up what a token sees in the
    order of its text, wherever that stands."""
    return list(range(position, position + len(parents)))


def lineage(parents: Sequence[int], token: int) -> list[int]:
    """Returns the tokens of a tree that one sees: itself, then those before it, the nearest first."""
    found = []
    while token >= 0:
        found.append(token)
        token = parents[token]
    return found


@dataclass(frozen=True, slots=True)
class OnBranch:
    """A token of a step that does not stand at its position."""

    position: int
    line: int  # it sees what stands before that, and then
    seen: Ints  # the step's tokens of its branch up to itself, the nearest first
    places: Ints  # where those stand

    def sees(self, first: int) -> Ints:
        """Returns the places of what it sees from that position on."""
        return np.concatenate([np.arange(first, self.line), self.places[: max(0, self.position + 1 - first)]])


def put_on_branches(
    parents: Sequence[int], stand: Sequence[int], first: int, positions: Ints, standing: Ints
) -> dict[int, OnBranch]:
    """Sets the positions of a tree's tokens, the step's from `first` on, and where they stand. Returns those
    on branches."""
    begin, found = int(positions[first]), dict[int, OnBranch]()
    tree, places = slice(first, first + len(parents)), np.array(stand)
    positions[tree], standing[tree] = begin + np.array(depths(parents)), places
    line = line_of(parents)
    for token in range(line, len(parents)):
        seen = np.array([each for each in lineage(parents, token) if each >= line])
        position = int(positions[first + token])
        found[first + token] = OnBranch(position, position + 1 - len(seen), first + seen, places[seen])
    return found


def visible(places: Ints, keys: int) -> torch.Tensor:
    """Returns a row [keys] of a mask: 0 at these places, and -inf."""
    row = torch.full((keys,), -torch.inf)
    row[torch.from_numpy(places)] = 0.0
    return row
