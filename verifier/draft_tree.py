"""What has arrived for a session and is not verified yet: a small tree of guesses at the continuation.

The root is the end of the committed log. A Commit walks down the tree: the subtree below the committed path
stays, the rest goes. Late, repeated and partly overtaken drafts need no special case: they are paths that
match the log, or do not.

Several sources may fill it. A node keeps the chance that each of them gives it, and counts as likely as the
one that is believed most makes it; if others say it too it is likelier, by what such tokens showed. A source
that says a token also says all before it, so that it has said a beginning of the path, or none of it.

Most drafts repeat what is known and add a token or two at its end. So there are no nodes while there is a
single path, and the likeliest one is kept at hand once there are several.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, zip_longest
from typing import NamedTuple, Protocol

from verifier.nodes import END, Nodes, Source
from verifier.survival_calibration import DOUBTED

MAX_NODES = 256  # of one source in a session's tree: bounds what a drafter can make us keep
MOST_BESIDE = 48  # nodes beside the path that are looked at for a step

Factors = Sequence[float]
"""How far what a source says is believed, by depth; the last one is for all beyond."""


class Belief(Protocol):
    """For how much of what a source says its chances count."""

    @property
    def factors(self) -> Factors:
        """Of what is likeliest at its place."""

    @property
    def beside(self) -> float:
        """Of what is not."""

    @property
    def wins(self) -> Factors:
        """Of what is left by `factors`, where several tokens are said, and the likeliest is looked for."""


class Fixed(NamedTuple):
    """A belief that nothing changes."""

    factors: Factors = (1.0,)
    beside: float = 1.0
    wins: Factors = (1.0,)


WHOLE = Fixed()


@dataclass(slots=True)
class Node:
    said: dict[Source, float] = field(default_factory=dict)  # P(accepted | all before it are), by who says so
    arrival: int = 0  # of two equal guesses the later wins
    children: dict[int, Node] = field(default_factory=dict)  # by token id


class DraftTree:
    def __init__(self) -> None:
        self.path: list[int] = []  # the likeliest one, from the root to a leaf
        self.said: dict[
            Source, list[float]
        ] = {}  # by source: the chances that it gives the path's first tokens
        self._root: Node | None = None  # None = that path is the only one
        self._arrivals = 0
        self._held: dict[Source, int] = {}  # nodes that each says, at most: commits do not count them anew
        self._beliefs: Mapping[Source, Belief] = {}
        self._agreed = 1.0

    @property
    def size(self) -> int:
        """Returns the number of nodes below the root."""
        return len(self.path) if self._root is None else _count(self._root)

    @property
    def chances(self) -> list[float]:
        """Returns for each token of the path P(accepted | all before it are), as far as that is believed."""
        return self.believed(len(self.path))

    def believed(self, count: int) -> list[float]:
        """Returns `chances` of the path's first `count` tokens."""
        if len(self.said) == 1:
            ((source, chances),) = self.said.items()
            return self._weighed(source, chances[:count])
        each = [self._weighed(source, chances[:count]) for source, chances in self.said.items()]
        return [
            self._joined([chance for chance in here if chance is not None]) for here in zip_longest(*each)
        ]

    def doubted(self, depth: int) -> bool:
        """Returns whether what is said of the path's token at that depth is doubted, whoever says it."""
        here = [source for source, chances in self.said.items() if depth < len(chances)]
        return all(_at(self._belief(source).factors, depth) < DOUBTED for source in here)

    def _joined(self, chances: list[float]) -> float:
        """Returns how likely a token counts as that sources of which so much is believed say."""
        most = max(chances)
        return most if len(chances) == 1 else 1 - (1 - most) * self._agreed

    def _weighed(self, source: Source, chances: Sequence[float]) -> list[float]:
        factors = self._belief(source).factors
        found = [factor * chance for factor, chance in zip(factors, chances, strict=False)]
        return found + [factors[-1] * chance for chance in chances[len(factors) :]]

    def believe(self, beliefs: Mapping[Source, Belief], agreed: float = 1.0) -> None:
        """From now on a source is believed so; wholly if it is not among them. `agreed`: of the chance that a
        token is wrong, what is left if several say it. The path is chosen anew if that may change it."""
        self._beliefs, self._agreed = beliefs, agreed
        if self._root is not None and len(beliefs) > 1:
            self._find_path(self._root)

    def _belief(self, source: Source) -> Belief:
        return self._beliefs.get(source, WHOLE)

    def nodes(self, believed: list[float], depth: int, least: float) -> Nodes:
        """Returns the first nodes of the path, of which so much is `believed`, and, up to `depth` of them
        behind one another, those beside it that survive with `least` at least."""
        length, root = len(believed), self._root
        if root is None or least > 1:
            said = {source: each[:length] for source, each in self.said.items()}
            return Nodes.path(self.path[:length], believed, said)
        nodes, tokens, chances, parents = list[Node](), list[int](), list[float](), list[int]()
        order, beside = count(), 0
        # Of those whose turn may come: -survival, a number against ties, depth, parent, and itself.
        waiting: list[tuple[float, int, int, int, int, float, Node, bool]] = []

        def reach(node: Node, survival: float, at: int, parent: int, on_path: bool) -> None:
            """What stands behind a node may have its turn, as far as the path is followed."""
            if on_path and at >= length:
                return
            for token, child, chance in self._at(node, at, self.path[at] if on_path else None):
                on = on_path and token == self.path[at]
                if on:
                    chance = believed[at]
                elif at >= depth or survival * chance < least:
                    continue
                entry = (-survival * chance, next(order), at, parent, token, chance, child, on)
                heappush(waiting, entry)

        reach(root, 1.0, 0, END, True)
        while waiting:
            survival, _, at, parent, token, chance, node, on_path = heappop(waiting)
            beside += not on_path
            if beside > MOST_BESIDE and not on_path:
                continue
            reach(node, -survival, at + 1, len(nodes), on_path)
            nodes.append(node)
            tokens.append(token)
            chances.append(chance)
            parents.append(parent)
        sources = {source for node in nodes for source in node.said}
        said_by = {source: [node.said.get(source) for node in nodes] for source in sources}
        return Nodes(tokens, chances, parents, said_by)

    def _at(self, parent: Node, depth: int, likeliest: int | None) -> Iterator[tuple[int, Node, float]]:
        """Yields what is said to follow a node, the likeliest first: the token, its node, and how likely it
        counts as. One of them at most is right: so what the likeliest leave is all that the others get."""
        if not parent.children:
            return
        token, node = (
            self._likeliest(parent, depth) if likeliest is None else (likeliest, parent.children[likeliest])
        )
        most = self._joined(
            [_at(self._belief(source).factors, depth) * said for source, said in node.said.items()]
        )
        yield token, node, most
        left = 1 - most
        others = [
            (
                self._joined([self._belief(source).beside * said for source, said in each.said.items()]),
                other,
                each,
            )
            for other, each in parent.children.items()
            if each is not node
        ]
        for chance, other, each in sorted(others, key=lambda one: (-one[0], -one[2].arrival)):
            chance = min(chance, most, left)
            yield other, each, chance
            left -= chance

    def length_of(self, source: Source) -> int:
        """Returns the length of the likeliest path of what that source alone says."""
        if self._root is None or len(self._held) < 2:
            return len(self.said.get(source, ()))
        return len(self.path_of(source))

    def claims(self, most: int) -> dict[Source, list[tuple[int, float]]]:
        """Returns what each source says by itself: the first tokens of its likeliest path, at most so many,
        with how likely each counts as. None where there is a single path, which nobody contradicts."""
        if self._root is None or len(self._held) < 2:
            return {}
        return {source: self._claims_of(source, self._root, most) for source in self._held}

    def _claims_of(self, source: Source, root: Node, most: int) -> list[tuple[int, float]]:
        factors, claims, node = self._belief(source).factors, list[tuple[int, float]](), root
        while len(claims) < most and (followed := _followed(node, source)) is not None:
            token, node = followed
            claims.append((token, _at(factors, len(claims)) * node.said[source]))
        return claims

    def path_of(self, source: Source) -> list[int]:
        """Returns the likeliest path of what that source alone says."""
        if self._root is None or len(self._held) < 2:
            return self.path[: len(self.said.get(source, ()))]
        path, node = list[int](), self._root
        while (followed := _followed(node, source)) is not None:
            token, node = followed
            path.append(token)
        return path

    def add(
        self,
        overtaken: Sequence[int],
        tokens: Sequence[int],
        parents: Sequence[int],
        survival: bytes,
        source: Source = None,
    ) -> int:
        """Adds a draft; returns how many of its tokens its source had not said before.

        `overtaken`: what was committed since the position that the draft starts from. Branches that differ
        from it are dropped, and what lies beyond it is kept. `parents` are indices into `tokens` (-1 = the
        draft's root), in topological order; empty = a chain. `survival[i]` / 255 is the probability that
        token i and all before it are accepted; empty = 1 of each.
        """
        if self._root is None and not parents:
            depth, known = len(overtaken), self.path
            if tokens[:depth] == overtaken and tokens[depth : depth + len(known)] == known:
                return self._append(tokens, depth, survival, source)
        return self._merge(overtaken, tokens, parents, survival, source)

    def _append(self, tokens: Sequence[int], depth: int, survival: bytes, source: Source) -> int:
        """Adds a chain that repeats the only path that there is, and perhaps goes on."""
        known, had = len(self.path), len(self.said.get(source, ()))
        self.path += tokens[depth + known : depth + MAX_NODES]
        if survival:
            told = survival[depth : depth + len(self.path)]
            before = (survival[depth - 1 : depth] or b"\xff") + told
            self.said[source] = [
                (here + 0.5) / (there + 0.5) if here < there else 1.0
                for there, here in zip(before, told, strict=False)
            ]
        else:
            self.said[source] = [1.0] * len(self.path)
        return len(self.path) - had

    def _merge(
        self,
        overtaken: Sequence[int],
        tokens: Sequence[int],
        parents: Sequence[int],
        survival: bytes,
        source: Source,
    ) -> int:
        root = self._root
        if root is None:
            root = _chain(self.path, self.said)
            self._held = {each: len(chances) for each, chances in self.said.items()}
        held = self._held.get(source, 0)
        if held + len(tokens) > MAX_NODES:
            held = _count(root, source)
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
                if child is None or source not in child.said:
                    if held + added >= MAX_NODES:
                        places.append(None)
                        continue
                    added += 1
                    if child is None:
                        child = place.children[token] = Node()
                child.said[source] = _chance(survival, index, parent) if survival else 1.0
                child.arrival = self._arrivals
                place = child
            places.append(place)
        self._held[source] = held + added
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
                    self._root, self.path, self.said = None, [], {}
                    return
                root = child
            self._root = root
        if self.path[:steps] == committed:
            del self.path[:steps]
            self.said = {source: rest for source, chances in self.said.items() if (rest := chances[steps:])}
        elif root is not None:
            self._find_path(root)
        else:
            self.path, self.said = [], {}

    def cut(self, path: Sequence[int]) -> None:
        """Drops the last token of a path that stands, and what is behind it."""
        *before, last = path
        root = self._root
        if root is None:
            depth = len(before)
            del self.path[depth:]
            self.said = {source: left for source, each in self.said.items() if (left := each[:depth])}
            return
        node = root
        for token in before:
            node = node.children[token]
        del node.children[last]
        self._find_path(root)

    def _find_path(self, root: Node) -> None:
        self.path, self.said, self._root = [], {}, None
        node = root
        while node.children:
            if len(node.children) == 1:
                ((token, node),) = node.children.items()
            else:
                self._root = root
                token, node = self._likeliest(node, len(self.path))
            self.path.append(token)
            for source, chance in node.said.items():
                self.said.setdefault(source, []).append(chance)

    def _likeliest(self, parent: Node, depth: int) -> tuple[int, Node]:
        """Returns the child that counts as likeliest, and its token."""
        factors = {
            source: _at(belief.factors, depth) * _at(belief.wins, depth)
            for source, belief in self._beliefs.items()
        }

        def likelihood(item: tuple[int, Node]) -> tuple[float, int]:
            said, arrival = item[1].said, item[1].arrival
            return self._joined([factors.get(one, 1.0) * chance for one, chance in said.items()]), arrival

        return max(parent.children.items(), key=likelihood)


def _at(factors: Factors, depth: int) -> float:
    return factors[min(depth, len(factors) - 1)]


def _followed(node: Node, source: Source) -> tuple[int, Node] | None:
    """Returns what that source says is likeliest to follow."""
    following = [item for item in node.children.items() if source in item[1].said]
    return max(following, key=lambda item: (item[1].said[source], item[1].arrival), default=None)


def _chain(path: Sequence[int], said: Mapping[Source, Sequence[float]]) -> Node:
    """Returns the root of a tree with that path alone."""
    root = node = Node()
    for index, token in enumerate(path):
        chances = {source: each[index] for source, each in said.items() if index < len(each)}
        child = node.children[token] = Node(chances)
        node = child
    return root


def _chance(survival: bytes, index: int, parent: int) -> float:
    """Returns P(token `index` accepted | its parent is), from the survival of the two: rounded, and not
    trusted."""
    before = survival[parent] if parent >= 0 else 255
    return min(1.0, (survival[index] + 0.5) / (before + 0.5))


def _count(root: Node, source: Source | None = None) -> int:
    """Returns the number of nodes below the root that a source says; of all of them if it is not given."""
    total, stack = 0, list(root.children.values())
    while stack:
        node = stack.pop()
        total += source is None or source in node.said
        stack.extend(node.children.values())
    return total
