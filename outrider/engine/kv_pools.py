"""The tensors behind the block table: keys and values of every layer, paged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch

from outrider.uploading import uploaded


class KvPools:
    """One pool of keys and one of values for each layer, made when the layer first shows its shapes; for a
    layer that has a row of a token instead, or beside them, a pool of those, with one head.

    A pool is [H, num_blocks + 1, block_size, W]; its last block is scratch, for tokens that nobody wants. W
    is the width D of a key or value, or more (see `kernel_width`), then filled up with zeros."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.scratch_block = num_blocks
        self._layers: dict[int, tuple[torch.Tensor, ...]] = {}  # keys and values, or rows
        self._writable: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the same as [H, slots, D]
        self._gathered: list[torch.Tensor | None] = [None, None]  # reused by every group and layer

    @property
    def bytes_per_block(self) -> int:
        """Over all layers seen so far."""
        pools = [pool for layer in self._layers.values() for pool in layer]
        return sum(pool.numel() * pool.element_size() for pool in pools) // (self.num_blocks + 1)

    @property
    def key_bytes(self) -> int:
        """Returns the size of a token's key and value in the first layer that has them; 0 before it has been
        seen."""
        for pools in self._layers.values():
            if len(pools) == 2:
                return sum(pool[:, 0, 0].numel() * pool.element_size() for pool in pools)
        return 0

    @property
    def on_cpu(self) -> bool:
        return all(pool.device.type == "cpu" for layer in self._layers.values() for pool in layer)

    def resized(self, num_blocks: int) -> Self:
        """Empty pools of the same layers with so many blocks, whose memory is taken at once."""
        pools = type(self)(num_blocks, self.block_size)
        for layer, whole in self._layers.items():
            pools._layers[layer] = tuple(pools._like(pool) for pool in whole)
        return pools

    def of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the pools of a layer's keys and values."""
        keys, values = self._layers[layer]
        return keys, values

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores key [H, T, D] and value [H, T, Dv] of the step's tokens at `slots` [T]."""
        pools = self._layers.get(layer)
        if pools is None:
            pools = self._layers[layer] = (self._new(key, _width(key)), self._new(value, _width(value)))
        writable = self._writable.get(layer)
        if writable is None:
            keys, values = (
                pool.view(pool.shape[0], -1, pool.shape[3])[:, :, : new.shape[2]]
                for pool, new in zip(pools, (key, value), strict=True)
            )
            writable = self._writable[layer] = (keys, values)
        writable[0].index_copy_(1, slots, key)
        writable[1].index_copy_(1, slots, value)

    def write_rows(self, layer: int, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores a row [T, W] of each of the step's tokens at `slots` [T], in a layer without keys."""
        pools = self._layers.get(layer)
        if pools is None:
            pools = self._layers[layer] = (self._new(rows[None], rows.shape[1]),)
        pools[0].view(-1, rows.shape[1]).index_copy_(0, slots, rows)

    def rows(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Returns the rows at these slots [T, n]: [T, n, W]."""
        (pool,) = self._layers[layer]
        return pool.view(-1, pool.shape[3])[slots]

    def gather(
        self, layer: int, blocks: torch.Tensor | slice, sessions: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [S, H, K, W] and values [S, H, K, Wv] of blocks [S * n], K = n * block_size; those of a run of
        blocks, which are one session's, as they lie.

        Valid until the next call: the memory is used again."""
        key_pool, value_pool = self.of(layer)
        if isinstance(blocks, slice):
            return _lying(key_pool, blocks), _lying(value_pool, blocks)
        return self._select(0, key_pool, blocks, sessions), self._select(1, value_pool, blocks, sessions)

    def gather_rows(self, layer: int, blocks: torch.Tensor | slice, sessions: int) -> torch.Tensor:
        """The same of a layer's rows: [S, K, W], which stay valid."""
        (pool,) = self._layers[layer]
        return pool[0, blocks].view(sessions, -1, pool.shape[3])

    def copy_slots(self, layer: int, copies: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Copies what slots [n] hold to others [n] in a layer, if there are any."""
        if copies is not None:
            sources, targets = copies
            for pool in self._layers.get(layer, ()):
                slots = pool.view(pool.shape[0], -1, pool.shape[3])
                slots.index_copy_(1, targets, slots.index_select(1, sources))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks, (from, to) each, in every layer; not while a step runs."""
        if not pairs:
            return
        for pools in self._layers.values():
            for pool in pools:
                for source, target in pairs:
                    pool[:, target] = pool[:, source]

    def _select(self, which: int, pool: torch.Tensor, blocks: torch.Tensor, sessions: int) -> torch.Tensor:
        heads, _, size, width = pool.shape
        elements = heads * blocks.numel() * size * width
        buffer = self._gathered[which]
        if buffer is None or buffer.numel() < elements or buffer.dtype != pool.dtype:
            buffer = self._gathered[which] = torch.empty(elements, dtype=pool.dtype, device=pool.device)
        out = buffer[:elements].view(heads, blocks.numel(), size * width)
        torch.index_select(pool.view(heads, -1, size * width), 1, blocks, out=out)
        return out.view(heads, sessions, -1, width).transpose(0, 1)

    def _like(self, pool: torch.Tensor) -> torch.Tensor:
        return self._new(pool, pool.shape[3])

    def _new(self, like: torch.Tensor, width: int) -> torch.Tensor:
        return self._zeros(like, (like.shape[0], self.num_blocks + 1, self.block_size, width))

    def _zeros(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Zeros, since unused slots are multiplied by a weight of zero. Written at once: a worker that has
        too little memory is to end when it starts, not under load."""
        if like.device.type != "cpu":
            return torch.zeros(shape, dtype=like.dtype, device=like.device)
        memory = np.empty(math.prod(shape) * like.element_size(), dtype=np.uint8)  # in huge pages, if any
        memory.fill(0)
        return torch.from_numpy(memory).view(like.dtype).view(shape)


class PagedPools(KvPools):
    """Pools as a paged attention kernel reads them: [num_blocks + 1, block_size, H, D]. Those of layers that
    are alike lie in one piece of memory once they are resized, so that a copy in all of them is one."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._pieces: list[torch.Tensor] = []  # [pools, num_blocks + 1, block_size, H, D]

    def resized(self, num_blocks: int) -> Self:
        pools, alike = type(self)(num_blocks, self.block_size), dict[Any, list[tuple[int, int]]]()
        for layer, both in self._layers.items():
            for which, pool in enumerate(both):
                alike.setdefault((pool.shape[2:], pool.dtype), []).append((layer, which))
        made = dict[tuple[int, int], torch.Tensor]()
        for (row, _), members in alike.items():
            like = self._layers[members[0][0]][members[0][1]]
            piece = self._zeros(like, (len(members), num_blocks + 1, self.block_size, *row))
            pools._pieces.append(piece)
            made |= zip(members, piece, strict=True)
        pools._layers = {layer: (made[layer, 0], made[layer, 1]) for layer in self._layers}
        return pools

    def made(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the layer's pools, for keys [H, ..., D] and values like these."""
        if layer not in self._layers:
            self._layers[layer] = (self._new(key, key.shape[2]), self._new(value, value.shape[2]))
        return self.of(layer)

    def copy_everywhere(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies what slots hold to others, (from, to) each, in every layer; before a step."""
        pieces = self._pieces or [pool[None] for layer in self._layers.values() for pool in layer]
        if not pieces:
            return
        sources, targets = uploaded(np.array(pairs, dtype=np.int64).T.copy(), pieces[0].device)
        with torch.inference_mode():
            for piece in pieces:
                slots = piece.flatten(1, 2)
                slots.index_copy_(1, targets, slots.index_select(1, sources))

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        for pool, new in zip(self.made(layer, key, value), (key, value), strict=True):
            pool.view(-1, *pool.shape[2:]).index_copy_(0, slots, new.transpose(0, 1))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        pools = [pool for layer in self._layers.values() for pool in layer]
        sources, targets = uploaded(np.array(pairs, dtype=np.int64).T.copy(), pools[0].device)
        with torch.inference_mode():
            for pool in pools:
                pool.index_copy_(0, targets, pool.index_select(0, sources))

    def _new(self, like: torch.Tensor, width: int) -> torch.Tensor:
        return self._zeros(like, (self.num_blocks + 1, self.block_size, like.shape[0], width))


def beside(layer: int) -> int:
    """Returns the number under which rows lie that a layer has beside its keys and values."""
    return -1 - layer


def _lying(pool: torch.Tensor, blocks: slice) -> torch.Tensor:
    heads, _, _, width = pool.shape
    return pool[:, blocks].view(1, heads, -1, width)


def kernel_width(width: int) -> int:
    """Returns the width at which torch's CPU attention kernel gives the same bits on every thread: 14 modulo
    16.

    It cuts one buffer into a piece for each thread, of (keys of a block + 2 + width) floats for a row, and
    the products that it calls round by how their operands lie in memory. So the pieces must be whole cache
    lines."""
    return width + (14 - width) % 16


def _width(key: torch.Tensor) -> int:
    """Returns the width of the pool that holds it."""
    return kernel_width(key.shape[2]) if _exact(key) else key.shape[2]


def _exact(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32
