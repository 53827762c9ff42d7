"""The book-keeper of recurrent states: which slot holds the state after which token. No tensors.

A layer with a recurrent state needs, of all tokens before, their state alone; and the state after a token
follows from the text up to it. There are a few slots for states. Each is known by the block of the KV pool
that its last token lies in, so that it goes with what that block holds: it is found by whoever shares the
block, and forgotten once the block is given back or written anew.

A step carries a session's state on over tokens that stand, never over drafts, which may be rejected. Of the
tokens behind it, what they would do to the state is kept beside it, and done at the next step to those that
stand by then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

MOST_DRAFTS = 32  # tokens behind a state of which it is kept what they would do to it
NO_SLOT = -1


class Work(Protocol):
    """What is read of a session's work in a step. A drafter without a model, which keeps books of blocks too,
    does not load torch, as step_inputs.py does."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def start(self) -> int: ...
    @property
    def blocks(self) -> Sequence[int]: ...
    @property
    def rows(self) -> int: ...
    @property
    def standing(self) -> int | None: ...


class StateLost(Exception):
    """A step needs a state that is no longer held, or a slot where all are needed."""


class Held(NamedTuple):
    """A state that lies in a slot."""

    slot: int
    length: int  # of the text that it is the state of
    leads: bool  # whether tokens behind it that ran last are those of the session that it is the state of
    passing: bool = False  # whether its session decoded then


class Turn(NamedTuple):
    """What a step does with the state of one session."""

    start: int  # position of the first token that runs
    tokens: int  # that run
    source: int  # slot of the state to begin with; NO_SLOT = that of no text
    length: int  # of the text of that one
    target: int  # slot of the state to keep
    until: int  # length of the text of that one
    mark: int = NO_SLOT  # slot of a state to keep for others, between these two
    marked: int = 0  # length of the text of that one: whole blocks


class StateSlots:
    """Hands out slots, and forgets the state that was not used for longest when one is needed: first of those
    that are kept for others."""

    def __init__(self, slots: int, num_blocks: int, block_size: int) -> None:
        self.slots = slots
        self.scratch = slots  # for tokens in the scratch block
        self._scratch_block = num_blocks
        self._block_size = block_size
        self._free = list(range(slots - 1, -1, -1))
        self._held: OrderedDict[int, Held] = OrderedDict()  # by block; least recently used first

    @property
    def most_sessions(self) -> int:
        """Returns how many sessions may have blocks at a time, so that each can be in one step with the
        others."""
        return self.slots // 2

    def at_end_of(self, block: int) -> bool:
        """Returns whether a text that ends with this block can go on from there."""
        held = self._held.get(block)
        return held is not None and held.length % self._block_size == 0

    def lost(self, blocks: Sequence[int], length: int) -> bool:
        """Returns whether a session with so many tokens in these blocks has to be read again."""
        return length > 0 and self._find(blocks, length) is None

    def forget(self, block: int) -> None:
        """Forgets the state whose text ends in a block, if there is one: what it holds is given up."""
        held = self._held.pop(block, None)
        if held is not None:
            self._free.append(held.slot)

    def begin(self, works: Sequence[Work]) -> list[Turn]:
        """Returns what a step does with its sessions' states, which count as kept from then on: steps run in
        the order in which they begin here, each once. Raises StateLost."""
        found = [self._source(work) for work in works]
        busy = {held.slot for _, held in found}
        turns = []
        for work, (block, held) in zip(works, found, strict=True):
            until = self._until(work)
            if work.blocks[0] == self._scratch_block:
                turns.append(Turn(0, len(work.tokens), NO_SLOT, 0, self.scratch, until))
                continue
            target = self._go_on(block, held, busy)
            self._keep(
                work.blocks[(until - 1) // self._block_size],
                Held(target, until, True, until <= work.start + 1),
            )
            turns.append(Turn(work.start, len(work.tokens), held.slot, held.length, target, until))
            busy.add(target)
        return [self._marked(work.blocks, turn, busy) for work, turn in zip(works, turns, strict=True)]

    def _until(self, work: Work) -> int:
        """Returns the length of the text whose state is kept: nothing of it is taken back."""
        end = work.start + len(work.tokens)
        if work.standing is None:
            return end - min(max(work.rows - 1, 0), MOST_DRAFTS)
        # A state at the end of a block is for all who share that, and so leads nobody for long.
        until = min(work.standing - (work.standing % self._block_size == 0), end)
        if end - until > MOST_DRAFTS:
            raise ValueError(f"{end - until} tokens may be taken back, and {MOST_DRAFTS} can be")
        return until

    def check_integrity(self) -> None:
        """Raises AssertionError where a slot is in two places, or in none."""
        slots = [*self._free, *(held.slot for held in self._held.values())]
        assert sorted(slots) == list(range(self.slots)), f"slots {sorted(slots)} of {self.slots}"

    def _source(self, work: Work) -> tuple[int, Held]:
        """Returns the state that a work begins with, and its block; forgets those of what it overwrites."""
        size, end = self._block_size, work.start + len(work.tokens)
        for block in work.blocks[work.start // size : -(-end // size)]:
            if block in self._held and self._held[block].length > work.start:
                self.forget(block)
        if not work.start:
            return self._scratch_block, Held(NO_SLOT, 0, False)
        found = self._find(work.blocks, work.start)
        if found is None:
            raise StateLost(f"there is no state of a session's first {work.start} tokens")
        self._held.move_to_end(found)
        return found, self._held[found]

    def _find(self, blocks: Sequence[int], length: int) -> int | None:
        """Returns the block of the state from which tokens at this length can go on."""
        nearest = (length - 1) // self._block_size
        for index in range(nearest, max(nearest - MOST_DRAFTS // self._block_size - 2, -1), -1):
            held = self._held.get(blocks[index])
            if held is not None and held.length <= length:
                stands = held.length == length or (held.leads and length - held.length <= MOST_DRAFTS)
                return blocks[index] if stands else None
        return None

    def _go_on(self, block: int, held: Held, busy: set[int]) -> int:
        """Returns the slot for a session's next state. The one before stays where it is, if others may begin
        with it."""
        if held.length % self._block_size:
            del self._held[block]
            return held.slot
        if held.slot != NO_SLOT:
            self._held[block] = held._replace(leads=False)
        slot = self._take(busy)
        if slot is None:
            raise StateLost(f"there are {self.slots} slots for states, and more sessions in a step")
        return slot

    def _marked(self, blocks: Sequence[int], turn: Turn, busy: set[int]) -> Turn:
        """Adds a state after the last whole block before the one to keep, if it is new and there is room."""
        marked = (turn.until - 1) // self._block_size * self._block_size
        if not marked or turn.target == self.scratch:
            return turn
        block, decodes = blocks[marked // self._block_size - 1], turn.until <= turn.start + 1
        if decodes and marked > self._block_size:  # of an answer the last one is enough
            self._give_way(blocks[marked // self._block_size - 2], busy)
        if marked <= turn.length:
            return turn
        slot = None if block in self._held else self._take(busy)
        if slot is None:
            return turn
        self._keep(block, Held(slot, marked, False, decodes))
        return turn._replace(mark=slot, marked=marked)

    def _give_way(self, block: int, busy: set[int]) -> None:
        held = self._held.get(block)
        if held is not None and held.passing and held.slot not in busy:
            self.forget(block)

    def _keep(self, block: int, held: Held) -> None:
        self.forget(block)
        self._held[block] = held

    def _take(self, busy: set[int]) -> int | None:
        """Returns a slot that this step does not need otherwise; None = there is none."""
        if self._free:
            return self._free.pop()
        idle = [
            (held.length % self._block_size > 0, block)
            for block, held in self._held.items()
            if held.slot not in busy
        ]
        if not idle:
            return None
        _, block = min(idle, key=lambda one: one[0])  # the first of them
        return self._held.pop(block).slot
