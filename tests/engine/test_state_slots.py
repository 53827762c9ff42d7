"""Slots of recurrent states: whatever sessions do, a step begins with the state of its session's own text."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from outrider.engine.kv_blocks import BlockPool, BlockTable
from outrider.engine.recurrent_state import MOST_BEFORE, ROWS
from outrider.engine.state_slots import MOST_DRAFTS, NO_SLOT, StateLost, StateSlots, Turn
from outrider.engine.step_inputs import Work

BLOCKS = 60


@dataclass
class Slot:
    """What stands in for tensors: the text that a state is of, and rows, which are positions and tokens."""

    text: list[int]
    rows: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass
class Session:
    log: list[int]
    table: BlockTable
    drafts: list[int] = field(default_factory=list)
    rows: int = 0

    def work(self, rng: random.Random, pool: BlockPool) -> Work:
        start = self.table.length
        tokens = self.log[start:][: rng.choice((1, 5, 16, 17, 40))]
        final = start + len(tokens) == len(self.log)
        self.drafts = [rng.randrange(3) for _ in range(rng.choice((0, 0, 3, MOST_DRAFTS)))] if final else []
        self.rows = rng.choice((len(self.drafts) + 1, len(tokens) + len(self.drafts))) if final else 0
        pool.extend(self.table, len(tokens) + len(self.drafts))
        return Work(self.table.blocks, start, [*tokens, *self.drafts], self.rows)

    def commit(self, rng: random.Random, pool: BlockPool) -> None:
        if self.rows:
            accepted = rng.randrange(len(self.drafts) + 1)
            pool.truncate(self.table, len(self.log) + accepted)
            self.log += [*self.drafts[:accepted], rng.randrange(3)]
        pool.seal(self.table, self.log)


def run(turn: Turn, work: Work, session: Session, slots: dict[int, Slot]) -> None:
    """Does what a layer does with slots, and looks at what it finds there."""
    text = [*session.log[: work.start], *work.tokens]
    if turn.source == NO_SLOT:
        assert turn.length == work.start == 0
        rows = dict[int, tuple[int, int]]()
    else:
        source = slots[turn.source]
        assert source.text == text[: turn.length]
        rows = {}
        for position in range(max(turn.length - MOST_BEFORE, 0), work.start):
            rows[position] = source.rows[position % ROWS]
            assert rows[position] == (position, text[position])
    rows |= {at: (at, text[at]) for at in range(work.start, len(text))}
    if turn.mark != NO_SLOT:
        kept = range(max(turn.marked - MOST_BEFORE, 0), turn.marked)
        slots[turn.mark] = Slot(text[: turn.marked], {at % ROWS: rows[at] for at in kept})
    if work.standing is None:
        assert work.start < turn.until <= len(text) - len(session.drafts)
    assert turn.until <= len(text) if work.standing is None else work.standing
    kept = range(max(turn.until - MOST_BEFORE, 0), len(text))
    before = slots[turn.target].rows if turn.target == turn.source else {}
    slots[turn.target] = Slot(text[: turn.until], before | {at % ROWS: rows[at] for at in kept})


@pytest.mark.parametrize(("count", "most"), [(40, 10), (8, 4), (8, 7)])
def test_a_step_begins_with_the_state_of_its_own_text(count: int, most: int) -> None:
    """`most` sessions at a time; where they are more than half the slots, some lose their states."""
    found = lost = 0
    for seed in range(12):
        rng = random.Random(seed)
        states = StateSlots(count, BLOCKS, 16)
        pool, slots = BlockPool(BLOCKS, 16, states), dict[int, Slot]()
        beginning = [rng.randrange(3) for _ in range(40)]
        open_ = list[Session]()
        for _ in range(150):
            if len(open_) < most:
                log = [
                    *beginning[: rng.choice((0, 16, 31, 32, 40))],
                    *[rng.randrange(3)] * rng.randrange(1, 30),
                ]
                session = Session(log, pool.open(log))
                found += session.table.length
                open_.append(session)
            works, parts = list[Work](), list[Session]()
            for session in rng.sample(open_, min(len(open_), count // 2, rng.randrange(1, 6))):
                if states.lost(session.table.blocks, session.table.length):
                    lost += 1
                    pool.close(session.table)
                    session.table = pool.open(session.log)
                room = (pool.available - len(open_)) * 16
                if room > 40 + MOST_DRAFTS and len(session.log) < 200:
                    works.append(session.work(rng, pool))
                    parts.append(session)
                else:
                    pool.close(session.table)
                    open_.remove(session)
            for turn, work, session in zip(states.begin(works), works, parts, strict=True):
                run(turn, work, session, slots)
            for session in parts:
                session.commit(rng, pool)
            pool.check_integrity([session.table for session in open_])
            states.check_integrity()
    assert found > 300, "prefixes are shared"
    assert (lost > 20) is (most > count // 2), lost


@pytest.mark.parametrize(("count", "most"), [(40, 5), (4, 4)])
def test_what_was_drafted_step_by_step_is_taken_back(count: int, most: int) -> None:
    """As a draft model does it. With slots enough no session loses its state."""
    accepted = lost = 0
    for seed in range(6):
        rng = random.Random(seed)
        states = StateSlots(count, BLOCKS, 16)
        pool, slots = BlockPool(BLOCKS, 16, states), dict[int, Slot]()
        beginning = [rng.randrange(3) for _ in range(40)]
        open_ = [Session(beginning[: rng.choice((7, 16, 33, 40))], BlockTable()) for _ in range(most)]
        for _ in range(300):
            session = rng.choice(open_)  # its drafts stand behind its log
            if states.lost(session.table.blocks, session.table.length):
                lost += 1
                pool.close(session.table)
            if not session.table.blocks:
                session.table = pool.open(session.log)
            text, start = [*session.log, *session.drafts], session.table.length
            read = text[start:][: rng.choice((1, 5, 40))]
            pool.extend(session.table, len(read))
            work = Work(session.table.blocks, start, read, 1, standing=len(session.log))
            run(states.begin([work])[0], work, Session(text, session.table), slots)
            if start + len(read) == len(text) and len(session.drafts) < MOST_DRAFTS:
                session.drafts.append(rng.randrange(3))
            if rng.random() < 0.2 and len(session.log) < 150:
                agreed = rng.randrange(len(session.drafts) + 1)
                accepted += agreed
                pool.truncate(session.table, min(session.table.length, len(session.log) + agreed))
                session.log += [*session.drafts[:agreed], *[3] * rng.randrange(1, 4)]
                session.drafts.clear()
            pool.seal(session.table, session.log)
            pool.check_integrity([each.table for each in open_])
            states.check_integrity()
    assert accepted > 300
    assert lost > 20 if count < 2 * most else not lost, lost


def test_no_session_goes_on_by_what_another_drafted() -> None:
    states = StateSlots(8, BLOCKS, 16)
    pool, text = BlockPool(BLOCKS, 16, states), list(range(32))

    def step(table: BlockTable, tokens: list[int], standing: int) -> None:
        pool.extend(table, len(tokens))
        start = table.length - len(tokens)
        states.begin([Work(table.blocks, start, tokens, 1, standing=standing)])

    drafting = pool.open(text)
    step(drafting, text, 32)
    pool.seal(drafting, text)
    other = pool.open([*text, 7])  # has the same two blocks, as far as there are states
    step(other, [*text, 7][other.length :], 33)
    step(drafting, [100], 32)
    states.forget(other.blocks[2])  # as others needed its slot
    assert states.lost(other.blocks, 33)


def test_a_work_without_a_state_is_refused() -> None:
    states = StateSlots(4, BLOCKS, 16)
    with pytest.raises(StateLost, match="no state of a session's first 20 tokens"):
        states.begin([Work([3, 4], 20, [1], 1)])
    with pytest.raises(StateLost, match="4 slots"):
        states.begin([Work([block], 0, [1], 1) for block in range(5)])


def test_a_prefix_is_shared_as_far_as_its_state_is_held() -> None:
    states = StateSlots(4, BLOCKS, 16)
    pool, text = BlockPool(BLOCKS, 16, states), list(range(70))
    table = pool.open(text)
    pool.extend(table, 70)
    states.begin([Work(table.blocks, 0, text, 1)])
    pool.seal(table, text)
    assert pool.cached(text).tokens == 64
    assert pool.cached(text[:60]).tokens == 0, "the states in between were not kept"
    pool.close(table)
    again = pool.open([*text[:64], 7])
    assert again.length == 64
    pool.extend(again, 1)
    (turn,) = states.begin([Work(again.blocks, 64, [7], 1)])
    assert (turn.length, turn.until) == (64, 65)


def test_what_a_step_overwrites_is_forgotten() -> None:
    states = StateSlots(4, BLOCKS, 16)
    states.begin([Work([1], 0, range(16), 0)])
    assert states.at_end_of(1)
    with pytest.raises(StateLost):
        states.begin([Work([1], 10, [5], 1)])
    assert not states.at_end_of(1)


def test_a_long_answer_leaves_the_state_of_its_prompt() -> None:
    states = StateSlots(4, BLOCKS, 16)
    pool, text = BlockPool(BLOCKS, 16, states), list(range(70))
    table = pool.open(text)
    pool.extend(table, 70)
    states.begin([Work(table.blocks, 0, text, 1)])
    for token in range(200):
        pool.seal(table, text)
        text.append(token)
        pool.extend(table, 1)
        states.begin([Work(table.blocks, len(text) - 1, text[-1:], 1)])
    pool.seal(table, text)
    assert pool.cached(text).tokens == 256 and pool.cached(text[:70]).tokens == 64
