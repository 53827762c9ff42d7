"""Draft tokens that a step may verify, each behind the one that it follows: a path, or a small tree. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

Source = Hashable
"""Who sends drafts: a drafter's seat."""

END = -1  # the log's end, as the one that a node follows


class Nodes(NamedTuple):
    """A node stands behind the one that it follows, and before those that are less likely to survive; so the
    first of them are a tree, too."""

    tokens: list[int]
    chances: list[float]  # P(accepted | the one that it follows is), as far as that is believed
    parents: Sequence[int]  # index of the one that it follows
    said: Mapping[
        Source, Sequence[float | None]
    ]  # by who says it, the same of the first ones; None = it does not

    @classmethod
    def path(
        cls, tokens: list[int], chances: list[float], said: Mapping[Source, Sequence[float | None]]
    ) -> Nodes:
        """Returns the nodes that follow one another."""
        return cls(tokens, chances, range(END, len(tokens) - 1), said)

    def first(self, count: int) -> Nodes:
        """Returns the first `count`."""
        if count >= len(self.tokens):
            return self
        said = {source: each[:count] for source, each in self.said.items()} if count else {}
        return Nodes(self.tokens[:count], self.chances[:count], _as_path(self.parents[:count]), said)

    def only(self, kept: Sequence[int]) -> Nodes:
        """Returns these, which are a tree."""
        return self if len(kept) == len(self.tokens) else self._ordered(kept)

    @property
    def is_path(self) -> bool:
        """Returns whether they follow one another."""
        return isinstance(self.parents, range)

    @property
    def survival(self) -> list[float]:
        """Returns of each P(it and all before it are accepted)."""
        if self.is_path:
            return list(accumulate(self.chances, mul))
        found: list[float] = []
        for parent, chance in zip(self.parents, self.chances, strict=True):
            found.append(chance if parent == END else found[parent] * chance)
        return found

    @property
    def depths(self) -> list[int]:
        """Returns of each how many it stands behind."""
        if self.is_path:
            return list(range(len(self.tokens)))
        found: list[int] = []
        for parent in self.parents:
            found.append(0 if parent == END else found[parent] + 1)
        return found

    @property
    def paths(self) -> list[list[int]]:
        """Returns of each the tokens from the log's end to its own."""
        found: list[list[int]] = []
        for parent, token in zip(self.parents, self.tokens, strict=True):
            found.append([token] if parent == END else [*found[parent], token])
        return found

    @property
    def in_line(self) -> list[tuple[int, bool]]:
        """Returns of each its token, and whether it follows the one before it here."""
        places = enumerate(zip(self.tokens, self.parents, strict=True))
        return [(token, parent == node - 1) for node, (token, parent) in places]

    @property
    def chains(self) -> list[tuple[int, int]]:
        """Returns the runs of nodes that follow one another, as (first, end). The first run is the path; it
        may be empty."""
        if self.is_path:
            return [(0, len(self.tokens))]
        begins = [0, *(node for node in range(1, len(self.tokens)) if self.parents[node] != node - 1)]
        return list(zip(begins, [*begins[1:], len(self.tokens)], strict=True))

    def in_chains(self) -> Nodes:
        """Returns them in such an order that each one's likeliest follower stands next to it."""
        if self.is_path:
            return self
        followers = self._followers()
        order: list[int] = []
        starts = deque(followers[END])
        while starts:
            node: int | None = starts.popleft()
            while node is not None:
                order.append(node)
                following = followers[node]
                starts.extend(following[1:])
                node = following[0] if following else None
        return self._ordered(order)

    def _ordered(self, order: Sequence[int]) -> Nodes:
        """Returns these in this order."""
        place = {node: index for index, node in enumerate(order)} | {END: END}
        said = {
            source: [each[node] if node < len(each) else None for node in order]
            for source, each in self.said.items()
        }
        tokens, chances = [self.tokens[node] for node in order], [self.chances[node] for node in order]
        return Nodes(tokens, chances, _as_path([place[self.parents[node]] for node in order]), said)

    def follow(self, chosen: Sequence[int], known: Sequence[bool] | None = None) -> list[int]:
        """Returns those that the target takes, one behind the other. `chosen[0]` is its token behind the log,
        `chosen[1 + i]` behind node i, if that is `known`."""
        if self.is_path and known is None:
            return list(range(alike(self.tokens, chosen)))
        by_token = {pair: node for node, pair in enumerate(zip(self.parents, self.tokens, strict=True))}
        followed: list[int] = []
        node = by_token.get((END, chosen[0]))
        while node is not None and (known is None or known[1 + node]):
            followed.append(node)
            node = by_token.get((node, chosen[1 + node]))
        return followed

    def judged(self, followed: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Returns what stood at each place to which the target came: the depth, and the nodes there, the
        likeliest first."""
        if self.is_path:
            return [(depth, [depth]) for depth in range(min(len(followed) + 1, len(self.tokens)))]
        followers = self._followers()
        found = [(depth, followers[node]) for depth, node in enumerate([END, *followed])]
        return found if found[-1][1] else found[:-1]

    def shown(
        self, source: Source, followed: Sequence[int]
    ) -> tuple[list[tuple[int, float, bool]], list[tuple[float, bool]]]:
        """Returns what the target showed of a source's nodes: of the likeliest at each depth the depth, the
        chance that it gave and whether it was right, and of those beside them the last two."""
        said, taken = self.said.get(source, ()), len(followed)
        if self.is_path:
            of_path = enumerate(said[: taken + 1])
            return [(depth, chance, depth < taken) for depth, chance in of_path if chance is not None], []
        likeliest, beside = list[tuple[int, float, bool]](), list[tuple[float, bool]]()
        for depth, standing in self.judged(followed):
            for place, node in enumerate(standing):
                if node >= len(said) or (chance := said[node]) is None:
                    continue
                right = depth < taken and node == followed[depth]
                if place == 0:
                    likeliest.append((depth, chance, right))
                else:
                    beside.append((chance, right))
        return likeliest, beside

    def beyond(self, followed: Sequence[int]) -> list[int]:
        """Returns the likeliest path that stood behind the last of those that the target took."""
        last = followed[-1] if followed else END
        if self.is_path:
            return list(range(last + 1, len(self.tokens)))
        followers, found = self._followers(), list[int]()
        while followers[last]:
            last = followers[last][0]
            found.append(last)
        return found

    def sources(self, node: int) -> dict[Source, float]:
        """Returns who says a node, with the chance that each gives it."""
        said = ((source, each[node]) for source, each in self.said.items() if node < len(each))
        return {source: chance for source, chance in said if chance is not None}

    def _followers(self) -> dict[int, list[int]]:
        followers: dict[int, list[int]] = {node: [] for node in range(END, len(self.tokens))}
        for node, parent in enumerate(self.parents):
            followers[parent].append(node)
        return followers


def alike(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Returns how many tokens both begin with."""
    count = 0
    for token, other in zip(tokens, others, strict=False):
        if token != other:
            break
        count += 1
    return count


def _as_path(parents: Sequence[int]) -> Sequence[int]:
    """Returns them as a range, if that is what they are."""
    path = range(END, len(parents) - 1)
    return path if not isinstance(parents, range) and list(parents) == list(path) else parents


NO_NODES = Nodes.path([], [], {})
