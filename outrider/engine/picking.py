"""Which keys tokens attend to where an indexer picks them.

An indexer has a small key of each token, and a few queries of it. In DeepSeek-V3.2 (arXiv 2512.02556) a key's
score for a token is the sum, by the token's weights, of the products of these queries with the key, as far as
they are positive; it sees the keys of the highest scores. In MiniMax-M3 each query picks blocks of keys, by
their largest product with it, for the heads that share a key head. Of equal scores the earlier are taken.
Each token has a product of its own, so that its scores keep their bits in any company.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import torch
import torch.nn.functional as F

from outrider.engine.kv_pools import KvPools, beside
from outrider.engine.step_inputs import StepInputs, View

EVERY_KEY = View(None, 1)
MOST_PRODUCTS = 2**22  # that are held at a time
FEWEST = 2  # tokens whose products are computed together; one is computed twice
ROWS = (1, 2, 5, 17, 48)  # tokens that must have the same scores
KEYS = (64, 128, 192, 448, 512, 576, 1024, 1408)  # of so many keys


class Rule(Protocol):
    """How keys are picked for the tokens of a step."""

    @property
    def query(self) -> torch.Tensor: ...  # [T, H, D]
    @property
    def groups(self) -> int: ...  # of query heads that see the same keys

    def takes_all(self, count: int) -> bool:
        """Returns whether all of so many keys are picked."""
        ...

    def picked(self, run: slice, keys: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Returns which keys [K, D] of their session some of the tokens see, of those up to themselves
        [t, K]: [G, t, K]."""
        ...


@dataclass(frozen=True, slots=True)
class Weighed:
    """The keys of the highest scores."""

    query: torch.Tensor  # [T, H, D]
    weights: torch.Tensor  # [T, H]
    most: int
    groups: int = 1

    def takes_all(self, count: int) -> bool:
        return count <= self.most

    def picked(self, run: slice, keys: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return highest(scores(self.query[run], keys, self.weights[run]), seen, self.most)[None]


@dataclass(frozen=True, slots=True)
class Blocks:
    """For each query of a token, and the group of heads that it is for, the blocks of the nearest keys, and
    of those with the largest products."""

    query: torch.Tensor  # [T, G, D]
    size: int  # keys of a block
    most: int  # blocks
    near: int  # of them, those up to the token's own that are taken in any case

    @property
    def groups(self) -> int:
        return self.query.shape[1]

    def takes_all(self, count: int) -> bool:
        return count <= self.most * self.size

    def picked(self, run: slice, keys: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        of_block = self._by_blocks(seen, False).any(-1)  # [t, B]
        behind = of_block.sum(-1, keepdim=True) - 1 - torch.arange(of_block.shape[1], device=keys.device)
        nearest = (behind >= 0) & (behind < self.near)
        best = torch.cat(
            [
                self._by_blocks(products.masked_fill(~some[:, None], -torch.inf), -torch.inf).amax(-1)
                for products, some in zip(
                    of_each(self.query[run], keys), _pieces(seen, self.query, keys), strict=True
                )
            ]
        ).masked_fill(nearest[:, None], torch.inf)  # [t, G, B]
        blocks = highest(best, of_block[:, None].expand_as(best), self.most)
        taken = blocks.repeat_interleave(self.size, dim=-1)[..., : len(keys)]
        return (taken & seen[:, None]).transpose(0, 1)

    def _by_blocks(self, of_keys: torch.Tensor, filled: float) -> torch.Tensor:
        """Returns [..., B, size] of [..., K]."""
        whole = F.pad(of_keys, (0, -of_keys.shape[-1] % self.size), value=filled)
        return whole.reshape(*whole.shape[:-1], -1, self.size)


def pick(pools: KvPools, layer: int, key: torch.Tensor, inputs: StepInputs, rule: Rule) -> torch.Tensor:
    """Stores the keys [T, D] of the step's tokens beside the layer's own. Returns which of its session's
    positions each token sees: [G, T, K] of bool."""
    pools.copy_slots(beside(layer), inputs.moves)
    pools.write_rows(beside(layer), key, inputs.slots)
    tiles = inputs.tiles(EVERY_KEY)
    longest = max(tile.calls[0][2].shape[3] for tile in tiles)
    positions = inputs.position_ids[0]
    seen = torch.arange(longest, device=key.device) <= positions[:, None]  # [T, K]
    found = seen.repeat(rule.groups, 1, 1)
    for tile in tiles:
        count = tile.calls[0][2].shape[3]
        if rule.takes_all(count):
            continue
        keys = pools.gather_rows(beside(layer), tile.blocks, tile.sessions)  # [S, K, D]
        for tokens, sessions, _ in tile.calls:
            each = (tokens.stop - tokens.start) // (sessions.stop - sessions.start)
            for number, of_session in enumerate(keys[sessions]):
                first = tokens.start + number * each
                run = slice(first, first + each)
                found[:, run, :count] = rule.picked(run, of_session, seen[run, :count])
    return found


def of_each(query: torch.Tensor, keys: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the products [some of t, H, K] of queries [t, H, D] with the keys [K, D] of one session."""
    turned = keys.float().T
    for some in _pieces(query, query, keys):
        # One alone may be multiplied by several threads, which divide the keys by how many there are.
        filled = some.float().expand(max(FEWEST, len(some)), -1, -1)
        yield torch.bmm(filled, turned.expand(len(filled), -1, -1))[: len(some)]


def _pieces(of_tokens: torch.Tensor, query: torch.Tensor, keys: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns [t, ...] of some tokens at a time, whose products are not too many."""
    return torch.split(of_tokens, max(1, MOST_PRODUCTS // (query.shape[1] * len(keys))))


def scores(query: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns those [t, K] of queries [t, H, D] for the keys [K, D] of one session, by weights [t, H]."""
    found = []
    for products, by in zip(of_each(query, keys), _pieces(weights, query, keys), strict=True):
        # A product of matrices may be added up otherwise with few keys.
        found.append(products.relu_().mul_(by[:, :, None].float()).sum(1))
    return torch.cat(found)


def highest(found: torch.Tensor, seen: torch.Tensor, most: int) -> torch.Tensor:
    """Returns which keys [..., K] have the `most` highest scores of those that are seen, all where there are
    no more. Of equal ones the first are taken."""
    found = found.masked_fill(~seen, -torch.inf)
    least = found.topk(most, dim=-1).values[..., -1:]  # it leaves open which of equal ones it takes
    above, equal = found > least, found == least
    left = most - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= left))) & seen


def keeps_bits(indexers: Iterable[tuple[int, ...]]) -> bool:
    """Tries indexers of so many heads and this width: whether a token has the same scores beside others, and
    with more keys behind it."""
    for heads, width in indexers:
        generator = torch.Generator().manual_seed(4)
        query = torch.randn(max(ROWS), heads, width, generator=generator, dtype=torch.float32)
        keys = torch.randn(max(KEYS), width, generator=generator, dtype=torch.float32)
        weights = torch.randn(max(ROWS), heads, generator=generator, dtype=torch.float32)
        products, whole = torch.cat([*of_each(query, keys)]), scores(query, keys, weights)
        for rows, count in product(ROWS, KEYS):
            found = torch.cat([*of_each(query[-rows:], keys[:count])])
            same = torch.equal(found, products[-rows:, :, :count])
            found = scores(query[-rows:], keys[:count], weights[-rows:])
            if not (same and torch.equal(found, whole[-rows:, :count])):
                return False
    return True
