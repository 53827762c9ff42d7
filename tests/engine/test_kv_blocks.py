"""The book-keeper against a model that writes real content into the blocks it is given."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from outrider.engine.kv_blocks import BlockPool, BlockTable, IntegrityError, OutOfBlocks

BLOCK = 4


class Memory:
    """Sessions that write what they hold into slots, as an engine does, and read it back."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK)
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}  # a slot holds all tokens up to it
        self.tables: list[BlockTable] = []
        self.logs: list[list[int]] = []  # what each table's slots hold
        self.committed: list[int] = []  # so many of them are committed

    def open(self, tokens: list[int]) -> None:
        found, available = self.pool.cached(tokens), self.pool.available
        table = self.pool.open(tokens)
        assert found == (table.length, len(table.blocks) - (available - self.pool.available))
        assert table.length <= max(len(tokens) - 1, 0)
        self.tables.append(table)
        self.logs.append(tokens[: table.length])
        self.committed.append(table.length)

    def append(self, index: int, tokens: list[int], commit: bool) -> None:
        table, log = self.tables[index], self.logs[index]
        before = (list(table.blocks), table.length, self.pool.available)
        try:
            self.pool.extend(table, len(tokens))
        except OutOfBlocks:
            assert (list(table.blocks), table.length, self.pool.available) == before
            return
        for token in tokens:
            self._write(table, len(log), (*log, token))
            log.append(token)
        if commit and len(log) == self.committed[index] + len(tokens):
            self.committed[index] = len(log)
            self.pool.seal(table, log)

    def truncate(self, index: int, length: int) -> None:
        table = self.tables[index]
        if length < table.sealed:
            with pytest.raises(ValueError, match="sealed"):
                self.pool.truncate(table, length)
            return
        if length < table.length and length % BLOCK and self._shared(table.blocks[length // BLOCK]):
            with pytest.raises(ValueError, match="is shared"):
                self.pool.truncate(table, length)
            return
        self.pool.truncate(table, length)
        del self.logs[index][length:]
        self.committed[index] = min(self.committed[index], length)

    def fork(self, index: int, length: int) -> None:
        """A branch, whose partly filled block is copied as an engine would."""
        table = self.tables[index]
        if length < table.sealed:
            with pytest.raises(ValueError, match="sealed"):
                self.pool.fork(table, length)
            return
        before = self.pool.available
        try:
            branch, copy = self.pool.fork(table, length)
        except OutOfBlocks:
            assert self.pool.available == before
            return
        if copy is not None:
            for offset in range(length % BLOCK):
                self.slots[copy[1], offset] = self.slots[copy[0], offset]
        self.tables.append(branch)
        self.logs.append(self.logs[index][:length])
        self.committed.append(min(self.committed[index], length))

    def _shared(self, block: int) -> bool:
        holders = sum(block in table.blocks for table in self.tables)
        return holders > 1 or self.pool._digests[block] is not None

    def close(self, index: int) -> None:
        table = self.tables.pop(index)
        self.pool.close(table)
        assert (len(table.blocks), table.length, table.sealed) == (0, 0, 0)
        del self.logs[index], self.committed[index]

    def check(self) -> None:
        self.pool.check_integrity(self.tables)
        held = {block for table in self.tables for block in table.blocks}
        assert self.pool.usage == pytest.approx(len(held) / self.pool.num_blocks)
        for table, log in zip(self.tables, self.logs, strict=True):
            assert table.length == len(log)
            if log:  # every slot still holds what this session, or whoever it shares with, wrote
                for position in {0, len(log) // 2, len(log) - 1, max(table.sealed - 1, 0)}:
                    assert self._read(table, position) == tuple(log[: position + 1])

    def _write(self, table: BlockTable, position: int, content: tuple[int, ...]) -> None:
        self.slots[table.blocks[position // BLOCK], position % BLOCK] = content

    def _read(self, table: BlockTable, position: int) -> tuple[int, ...]:
        return self.slots[table.blocks[position // BLOCK], position % BLOCK]


class BookKeeping(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(3, 12))
    def start(self, num_blocks: int) -> None:
        self.memory = Memory(num_blocks)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def open(self, tokens: list[int]) -> None:
        self.memory.open(tokens)

    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), commit=st.booleans())
    def append(self, data: st.DataObject, tokens: list[int], commit: bool) -> None:
        if self.memory.tables:
            self.memory.append(data.draw(st.integers(0, len(self.memory.tables) - 1)), tokens, commit)

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        if self.memory.tables:
            index = data.draw(st.integers(0, len(self.memory.tables) - 1))
            self.memory.truncate(index, data.draw(st.integers(0, len(self.memory.logs[index]))))

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        if self.memory.tables:
            index = data.draw(st.integers(0, len(self.memory.tables) - 1))
            self.memory.fork(index, data.draw(st.integers(0, len(self.memory.logs[index]))))

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        if self.memory.tables:
            self.memory.close(data.draw(st.integers(0, len(self.memory.tables) - 1)))

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "memory"):
            self.memory.check()


TestBookKeeping = BookKeeping.TestCase
TestBookKeeping.settings = settings(max_examples=60, stateful_step_count=40)


def test_nothing_leaks_in_ten_thousand_operations() -> None:
    rng = random.Random(7)
    memory = Memory(40)
    shared = 0
    for _ in range(10_000):
        action = rng.random()
        index = rng.randrange(len(memory.tables)) if memory.tables else -1
        if action < 0.15 or index < 0:
            memory.open([rng.randrange(2) for _ in range(rng.randrange(1, 40))])
            shared += memory.tables[-1].length
        elif action < 0.7:
            memory.append(index, [rng.randrange(2) for _ in range(rng.randrange(1, 10))], rng.random() < 0.7)
        elif action < 0.8:
            memory.truncate(index, rng.randrange(len(memory.logs[index]) + 1))
        elif action < 0.85:
            memory.fork(index, rng.randrange(len(memory.logs[index]) + 1))
        else:
            memory.close(index)
        memory.check()
    assert shared > 100 and memory.pool.evictions > 100  # the run did what it is for
    while memory.tables:
        memory.close(0)
    memory.check()
    assert memory.pool.available == 40 and memory.pool.usage == 0


def test_open_shares_full_blocks_and_leaves_one_token_to_run() -> None:
    pool = BlockPool(8, BLOCK)
    tokens = list(range(8))
    first = pool.open(tokens)
    assert first.length == 0
    pool.extend(first, 8)
    pool.seal(first, tokens)
    assert first.sealed == 8
    assert pool.open(tokens).length == 4  # not 8: the last token must run
    assert pool.open([*tokens, 9]).length == 8
    assert pool.open([0, 1, 2, 3, 9, 9, 9, 9, 9]).length == 4
    assert pool.open([9, *tokens]).length == 0
    assert pool.open([]).length == 0


def test_equal_content_after_another_beginning_is_not_shared() -> None:
    pool = BlockPool(8, BLOCK)
    table = pool.open([1] * 8)
    pool.extend(table, 8)
    pool.seal(table, [1, 1, 1, 1, 2, 2, 2, 2])
    assert pool.open([3, 3, 3, 3, 2, 2, 2, 2, 2]).length == 0


def test_sessions_of_different_salts_share_nothing_and_of_the_same_all_that_is_equal() -> None:
    pool, tokens = BlockPool(12, BLOCK), list(range(9))
    for salt in (b"alice", b"bob", b""):
        assert pool.cached(tokens, salt).tokens == 0
        table = pool.open(tokens, salt)
        assert table.length == 0, "what another salt has cached is computed again"
        pool.extend(table, 8)
        pool.seal(table, tokens)
        assert pool.cached(tokens, salt) == (8, 2)
    shared, branch = pool.open(tokens, b"bob"), pool.open(tokens[:5], b"bob")
    assert shared.length == 8 and pool.fork(branch, 4)[0].digest == branch.digest
    pool.extend(branch, 4)
    pool.seal(branch, [0, 1, 2, 3, 9, 9, 9, 9])  # goes on under its salt
    other = [0, 1, 2, 3, 9, 9, 9, 9, 9]
    assert [pool.cached(other, salt).tokens for salt in (b"alice", b"bob", b"")] == [4, 8, 4]


def test_no_salt_is_the_hash_of_another_session_s_block() -> None:
    pool, tokens = BlockPool(8, BLOCK), list(range(9))
    table = pool.open(tokens)
    pool.extend(table, 8)
    pool.seal(table, tokens[:4])
    first = table.digest
    pool.seal(table, tokens)
    assert pool.cached(tokens[4:], first).tokens == 0


def test_the_longest_unused_is_evicted_first_and_ends_before_beginnings() -> None:
    pool = BlockPool(4, BLOCK)
    for start in (0, 100):
        tokens = list(range(start, start + 8))
        table = pool.open(tokens)
        pool.extend(table, 8)
        pool.seal(table, tokens)
        pool.close(table)
    assert pool.available == 4 and pool.usage == 0
    pool.close(pool.open([*range(8), 0]))  # used again: now the younger one
    room = pool.open([7])
    pool.extend(room, 1)
    assert pool.evictions == 1
    assert pool.open([*range(100, 108), 0]).length == 4
    assert pool.open([*range(8), 0]).length == 8


def test_seal_looks_only_at_slots_in_use_and_committed_tokens() -> None:
    pool = BlockPool(4, BLOCK)
    table = pool.open([5] * 16)
    pool.extend(table, 6)
    pool.seal(table, [5] * 16)
    assert table.sealed == 4
    pool.extend(table, 4)
    pool.seal(table, [5] * 7)  # slots 7.. hold drafts
    assert table.sealed == 4
    pool.truncate(table, 4)
    with pytest.raises(ValueError, match="from 4"):
        pool.truncate(table, 3)
    with pytest.raises(ValueError, match="to 4"):
        pool.truncate(table, 5)


def test_integrity_names_what_is_wrong() -> None:
    pool = BlockPool(4, BLOCK)
    table = pool.open([1] * 9)
    pool.extend(table, 8)
    pool.seal(table, [1] * 8)
    pool.check_integrity([table])
    with pytest.raises(IntegrityError, match="0 tables hold it"):
        pool.check_integrity([])
    pool._free.append(table.blocks[0])
    with pytest.raises(IntegrityError, match=f"block {table.blocks[0]} is in 2"):
        pool.check_integrity()
