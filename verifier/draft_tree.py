"""What has arrived for a session and is not verified yet: a small tree of guesses at the continuation.

The root is the end of the committed log. A Commit walks down the tree: the subtree below the committed path
stays, the rest goes. Late, repeated and partly overtaken drafts need no special case: they are paths that
match the log, or do not.

Most drafts repeat what is known and add a token or two at its end. So there are no nodes while there is a
single path, and the likeliest one is kept at hand once there are several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_NODES = 256  # of one session's tree: bounds what a drafter can make us keep


@dataclass(slots=True)
class Node:
    chance: float = 1.0  # P(accepted | all before it are), as its drafter says
    arrival: int = 0  # of two equal guesses the later wins
    children: dict[int, Node] = field(default_factory=dict)  # by token id


class DraftTree:
    def __init__(self) -> None:
        self.path: list[int] = []  # the likeliest one, from the root to a leaf
        self.chances: list[float] = []  # of each of its tokens: P(accepted | all before it are)
        self._root: Node | None = None  # None = that path is the only one
        self._arrivals = 0
        self._held = 0  # nodes below the root, at most: commits do not count them anew

    @property
    def size(self) -> int:
        """Returns the number of nodes below the root."""
        return len(self.path) if self._root is None else _count(self._root)

    def add(
        self, overtaken: Sequence[int], tokens: Sequence[int], parents: Sequence[int], survival: bytes
    ) -> int:
        """Adds a draft; returns how many of its tokens are new here.

        `overtaken`: what was committed since the position that the draft starts from. Branches that differ
        from it are dropped, and what lies beyond it is kept. `parents` are indices into `tokens` (-1 = the
        draft's root), in topological order; empty = a chain. `survival[i]` / 255 is the probability that
        token i and all before it are accepted; empty = 1 of each.
        """
        if self._root is None and not parents:
            depth, known = len(overtaken), self.path
            if tokens[:depth] == overtaken and tokens[depth : depth + len(known)] == known:
                return self._append(tokens, depth, survival)
        return self._merge(overtaken, tokens, parents, survival)

    def _append(self, tokens: Sequence[int], depth: int, survival: bytes) -> int:
        """Adds a chain that repeats the only path that there is, and perhaps goes on."""
        known = len(self.path)
        self.path += tokens[depth + known : depth + MAX_NODES]
        if survival:
            before, chances = survival[depth - 1] if depth else 255, []
            for here in survival[depth : depth + len(self.path)]:
                chances.append((here + 0.5) / (before + 0.5) if here < before else 1.0)
                before = here
            self.chances = chances
        else:
            self.chances = [1.0] * len(self.path)
        return len(self.path) - known

    def _merge(
        self, overtaken: Sequence[int], tokens: Sequence[int], parents: Sequence[int], survival: bytes
    ) -> int:
        root = self._root
        if root is None:
            root, self._held = _chain(self.path, self.chances), len(self.path)
        elif self._held + len(tokens) > MAX_NODES:
            self._held = _count(root)
        self._arrivals += 1
        added = 0
        depth = len(overtaken)
        # Each token's place: the node it became, or its depth on the overtaken path, or None if it died.
        places: list[Node | int | None] = []
        for index, token in enumerate(tokens):
            parent = parents[index] if parents else index - 1
            place: Node | int | None = places[parent] if parent >= 0 else (0 if depth else root)
            if isinstance(place, int):
                place = place + 1 if token == overtaken[place] else None
                if place == depth:
                    place = root
            elif place is not None:
                child = place.children.get(token)
                if child is None:
                    if self._held >= MAX_NODES:
                        places.append(None)
                        continue
                    child = place.children[token] = Node()
                    added += 1
                    self._held += 1
                child.chance = _chance(survival, index, parent) if survival else 1.0
                child.arrival = self._arrivals
                place = child
            places.append(place)
        self._find_path(root)
        return added

    def advance(self, committed: Sequence[int]) -> None:
        """Moves the root along newly committed tokens."""
        steps = len(committed)
        root = self._root
        if root is not None:
            for token in committed:
                child = root.children.get(token)
                if child is None:
                    self._root, self.path, self.chances = None, [], []
                    return
                root = child
            self._root = root
        if self.path[:steps] == committed:
            del self.path[:steps], self.chances[:steps]
        elif root is not None:
            self._find_path(root)
        else:
            self.path, self.chances = [], []

    def _find_path(self, root: Node) -> None:
        self.path, self.chances, self._root = [], [], None
        node = root
        while node.children:
            if len(node.children) == 1:
                ((token, node),) = node.children.items()
            else:
                self._root = root
                token, node = max(node.children.items(), key=lambda item: (item[1].chance, item[1].arrival))
            self.path.append(token)
            self.chances.append(node.chance)


def _chain(path: Sequence[int], chances: Sequence[float]) -> Node:
    """Returns the root of a tree with that path alone."""
    root = node = Node()
    for token, chance in zip(path, chances, strict=True):
        child = node.children[token] = Node(chance)
        node = child
    return root


def _chance(survival: bytes, index: int, parent: int) -> float:
    """Returns P(token `index` accepted | its parent is), from the survival of the two: rounded, and not
    trusted."""
    before = survival[parent] if parent >= 0 else 255
    return min(1.0, (survival[index] + 0.5) / (before + 0.5))


def _count(root: Node) -> int:
    total, stack = 0, list(root.children.values())
    while stack:
        total += 1
        stack.extend(stack.pop().children.values())
    return total
