"""The book-keeper of the KV pool: which block holds what. Integers and hashes only, no tensors.

A block is an index into the pools of keys and values, `block_size` tokens long. A block that is full of
committed tokens is registered under a hash of everything up to its end, so that any session with the same
beginning shares it. The hash begins with a salt: sessions of different salts share nothing, so that what one
finds cached tells nothing of the others. Registered blocks are never written again; nobody's registered
blocks stay cached until their room is needed.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from outrider.engine.state_slots import StateSlots


class OutOfBlocks(Exception):
    """The pool has fewer blocks to give than were asked for; nothing was changed."""


class IntegrityError(AssertionError):
    """The book-keeper contradicts itself; the message names the block and the contradiction."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """A session's place in the pool. Changed by the BlockPool alone."""

    blocks: array[int] = field(default_factory=lambda: array("q"))  # i holds positions i * block_size and on
    length: int = 0  # token slots in use
    sealed: int = 0  # tokens in blocks whose content is fixed; a multiple of the block size
    digest: bytes = b""  # content hash of the last sealed block, which covers all before it, and the salt


class Cached(NamedTuple):
    """What a table would share if it were opened now."""

    tokens: int = 0
    held: int = 0  # of their blocks, those that other tables hold: sharing them takes no room


class BlockPool:
    """Hands out blocks, shares equal prefixes, and forgets the least recently used when room is needed."""

    def __init__(self, num_blocks: int, block_size: int = 16, states: StateSlots | None = None) -> None:
        """`states`: of a model that keeps some; then a prefix is shared up to where its state is held."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.states = states
        self.evictions = 0  # cached blocks forgotten since the start
        self._free = list(range(num_blocks - 1, -1, -1))  # hold nothing
        self._holders = [0] * num_blocks  # tables that hold each block
        self._digests: list[bytes | None] = [None] * num_blocks  # of registered blocks
        self._by_digest: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # registered, held by nobody; oldest first

    @property
    def available(self) -> int:
        """Returns how many blocks `extend` can hand out: free ones, and cached ones that nobody holds."""
        return len(self._free) + len(self._idle)

    @property
    def usage(self) -> float:
        """Returns the share of the blocks that tables hold, 0 to 1."""
        return 1.0 - self.available / self.num_blocks

    def open(
        self, tokens: Sequence[int], salt: bytes = b"", digests: list[bytes] | None = None
    ) -> BlockTable:
        """Returns a table that shares the longest run of full blocks with which `tokens` begin, of those that
        were cached under the same salt.

        At least one token is left out, since one has to run to give logits; `length` is what was shared.
        `digests`: for who asks again and again, those of the first blocks, as far as they are known; more are
        added."""
        table = BlockTable(digest=_root(salt))
        for block, digest in self._shared(tokens, table.digest, digests):
            if self._holders[block] == 0:
                del self._idle[block]
            self._holders[block] += 1
            table.blocks.append(block)
            table.digest = digest
        table.length = table.sealed = len(table.blocks) * self.block_size
        return table

    def cached(self, tokens: Sequence[int], salt: bytes = b"", digests: list[bytes] | None = None) -> Cached:
        """Returns what `open` would find."""
        blocks = [block for block, _ in self._shared(tokens, _root(salt), digests)]
        return Cached(len(blocks) * self.block_size, sum(self._holders[block] > 0 for block in blocks))

    def extend(self, table: BlockTable, n: int) -> None:
        """Reserves `n` more slots. Raises OutOfBlocks, with nothing changed, where there is no room."""
        need = -(-(table.length + n) // self.block_size) - len(table.blocks)
        if need > self.available:
            raise OutOfBlocks(
                f"{need} KV blocks are needed and {self.available} of {self.num_blocks} can be had"
            )
        for _ in range(need):
            block = self._free.pop() if self._free else self._evict()
            self._holders[block] = 1
            table.blocks.append(block)
        table.length += n

    def fork(self, table: BlockTable, length: int) -> tuple[BlockTable, tuple[int, int] | None]:
        """Returns a second table with the first `length` slots of this one, from `table.sealed` on.

        Full blocks are shared. One that they fill in part gets a block of its own, into which the caller
        copies it: (from, to). Raises OutOfBlocks, with nothing changed, where there is no room for that."""
        if not table.sealed <= length <= table.length:
            raise ValueError(f"fork at {length}: must be from {table.sealed} (sealed) to {table.length}")
        full, partly = divmod(length, self.block_size)
        branch = BlockTable(table.blocks[:full], full * self.block_size, table.sealed, table.digest)
        for block in branch.blocks:
            self._holders[block] += 1
        if not partly:
            return branch, None
        try:
            self.extend(branch, partly)
        except OutOfBlocks:
            self.close(branch)
            raise
        return branch, (table.blocks[full], branch.blocks[full])

    def truncate(self, table: BlockTable, length: int) -> None:
        """Gives back the slots from `length` on: what a rejected draft costs.

        Raises ValueError below `table.sealed`, whose content is fixed, above `table.length`, or within a
        block that is shared."""
        if not table.sealed <= length <= table.length:
            raise ValueError(f"truncate to {length}: must be from {table.sealed} (sealed) to {table.length}")
        full, partly = divmod(length, self.block_size)
        if partly and length < table.length and not self._may_be_written(table.blocks[full]):
            raise ValueError(f"truncate to {length}: block {table.blocks[full]} is shared")
        keep = -(-length // self.block_size)
        for block in reversed(table.blocks[keep:]):
            self._release(block)
        del table.blocks[keep:]
        table.length = length

    def seal(self, table: BlockTable, tokens: Sequence[int]) -> None:
        """Registers every newly full block. `tokens` are the committed tokens from position 0.

        Slots beyond `tokens` may hold drafts, and tokens beyond `table.length` are not looked at. Costs what
        is new. Where an equal block is registered already, both stay: this one is its table's own."""
        for index in range(
            table.sealed // self.block_size, min(len(tokens), table.length) // self.block_size
        ):
            table.digest = self._chain(table.digest, tokens, index)
            if table.digest not in self._by_digest:
                block = table.blocks[index]
                self._by_digest[table.digest] = block
                self._digests[block] = table.digest
            table.sealed = (index + 1) * self.block_size

    def close(self, table: BlockTable) -> None:
        """Releases all blocks; registered ones stay cached. The table is empty afterwards."""
        for block in reversed(table.blocks):  # so that the end of a text is forgotten before its beginning
            self._release(block)
        table.blocks, table.length, table.sealed, table.digest = array("q"), 0, 0, b""

    def own_tokens(self, table: BlockTable) -> int:
        """Returns how many tokens are in blocks that no other table holds: what may be forgotten once this
        one is closed."""
        own = sum(self._holders[block] == 1 for block in table.blocks)
        return min(own * self.block_size, table.length)

    def check_integrity(self, tables: Iterable[BlockTable] | None = None) -> None:
        """Raises IntegrityError where the books contradict themselves, or the tables (all open ones) where
        given."""
        held = [block for block, holders in enumerate(self._holders) if holders]
        places = Counter([*self._free, *self._idle, *held])
        for block in range(self.num_blocks):
            if places[block] != 1:
                raise IntegrityError(
                    f"block {block} is in {places[block]} of the places free, cached and held"
                )
            digest = self._digests[block]
            if digest is not None and self._by_digest.get(digest) != block:
                raise IntegrityError(f"block {block} is registered under a hash that leads elsewhere")
            if digest is None and block in self._idle:
                raise IntegrityError(f"block {block} is cached without a hash")
        if sum(digest is not None for digest in self._digests) != len(self._by_digest):
            raise IntegrityError("a hash leads to a block that is not registered under it")
        if any(self._digests[block] is not None for block in self._free):
            raise IntegrityError("a free block is registered")
        if tables is not None:
            self._check_tables(list(tables))

    def _check_tables(self, tables: Sequence[BlockTable]) -> None:
        holders = Counter(block for table in tables for block in table.blocks)
        for block, count in enumerate(self._holders):
            if holders[block] != count:
                raise IntegrityError(
                    f"block {block} counts {count} holders and {holders[block]} tables hold it"
                )
        for table in tables:
            if len(table.blocks) != -(-table.length // self.block_size):
                raise IntegrityError(f"a table of {table.length} tokens holds {len(table.blocks)} blocks")
            if table.sealed > table.length or table.sealed % self.block_size:
                raise IntegrityError(f"a table of {table.length} tokens has {table.sealed} sealed")
            for block in table.blocks[table.length // self.block_size :]:
                if holders[block] != 1 or self._digests[block] is not None:
                    raise IntegrityError(f"block {block} may still be written and is shared or registered")

    def _shared(
        self, tokens: Sequence[int], digest: bytes, digests: list[bytes] | None
    ) -> list[tuple[int, bytes]]:
        """Returns the part of _beginning that a table can share."""
        found = list(self._beginning(tokens, digest, digests))
        while self.states is not None and found and not self.states.at_end_of(found[-1][0]):
            found.pop()
        return found

    def _beginning(
        self, tokens: Sequence[int], digest: bytes, digests: list[bytes] | None
    ) -> Iterator[tuple[int, bytes]]:
        """Yields the longest cached run of full blocks with which `tokens` begin, and each one's hash.
        `digest` is that of no block yet, under a salt."""
        known = [] if digests is None else digests
        for index in range((len(tokens) - 1) // self.block_size):
            if index == len(known):
                known.append(self._chain(digest, tokens, index))
            digest = known[index]
            block = self._by_digest.get(digest)
            if block is None:
                return
            yield block, digest

    def _chain(self, parent: bytes, tokens: Sequence[int], index: int) -> bytes:
        block = tokens[index * self.block_size : (index + 1) * self.block_size]
        return blake2b(parent + array("I", block).tobytes(), digest_size=16).digest()

    def _may_be_written(self, block: int) -> bool:
        return self._holders[block] == 1 and self._digests[block] is None

    def _release(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block] == 0:
            if self._digests[block] is None:
                self._free.append(block)
                if self.states is not None:
                    self.states.forget(block)
            else:
                self._idle[block] = None

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        digest = self._digests[block]
        assert digest is not None
        del self._by_digest[digest]
        self._digests[block] = None
        if self.states is not None:
            self.states.forget(block)
        self.evictions += 1
        return block


def _root(salt: bytes) -> bytes:
    """Returns what the hashes of all blocks under a salt begin with. It is no hash of any block."""
    return blake2b(salt, digest_size=16, person=b"cache salt").digest() if salt else b""
