"""What has arrived for a session and is not verified yet: a small tree of guesses at the continuation.

The root is the end of the committed log. A Commit walks down the tree: the subtree below the committed path
stays, the rest goes. Late, repeated and partly overtaken drafts need no special case: they are paths that
match the log, or do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_NODES = 256  # of one session's tree: bounds what a drafter can make us keep


@dataclass(slots=True)
class Node:
    survival: int = 255  # P(this and all before it are accepted) * 255, as its drafter says
    arrival: int = 0  # of two equal guesses the later wins
    children: dict[int, Node] = field(default_factory=dict)  # by token id


class DraftTree:
    def __init__(self) -> None:
        self._root = Node()
        self._arrivals = 0
        self.size = 0  # nodes below the root

    def add(
        self, overtaken: Sequence[int], tokens: Sequence[int], parents: Sequence[int], survival: bytes
    ) -> int:
        """Adds a draft; returns how many of its tokens are new here.

        `overtaken`: what was committed since the position that the draft starts from. Branches that differ
        from it are dropped, and what lies beyond it is kept. `parents` are indices into `tokens` (-1 = the
        draft's root), in topological order; empty = a chain.
        """
        self._arrivals += 1
        added = 0
        depth = len(overtaken)
        # Each token's place: the node it became, or its depth on the overtaken path, or None where it died.
        places: list[Node | int | None] = []
        for index, token in enumerate(tokens):
            parent = parents[index] if parents else index - 1
            place: Node | int | None = places[parent] if parent >= 0 else (0 if depth else self._root)
            if isinstance(place, int):
                place = place + 1 if token == overtaken[place] else None
                if place == depth:
                    place = self._root
            elif place is not None:
                child = place.children.get(token)
                if child is None:
                    if self.size >= MAX_NODES:
                        places.append(None)
                        continue
                    child = place.children[token] = Node()
                    self.size += 1
                    added += 1
                child.survival = survival[index] if survival else 255
                child.arrival = self._arrivals
                place = child
            places.append(place)
        return added

    def advance(self, committed: Sequence[int]) -> None:
        """Moves the root along newly committed tokens."""
        for token in committed:
            child = self._root.children.get(token)
            if child is None:
                self._root, self.size = Node(), 0
                return
            self._root = child
        self.size = _count(self._root)

    def best_path(self, limit: int) -> list[int]:
        """The likeliest path from the root, at most `limit` tokens."""
        path: list[int] = []
        node = self._root
        while node.children and len(path) < limit:
            token, node = max(node.children.items(), key=lambda item: (item[1].survival, item[1].arrival))
            path.append(token)
        return path


def _count(node: Node) -> int:
    total, stack = 0, list(node.children.values())
    while stack:
        total += 1
        stack.extend(stack.pop().children.values())
    return total
