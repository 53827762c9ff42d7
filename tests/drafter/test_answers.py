"""What is remembered of finished answers, and how much."""

from __future__ import annotations

import random

from drafter import answers
from drafter.answers import END, FIRST, Answers

ALICE, BOB = (b"a", "m"), (b"b", "m")


def test_memory_is_bounded_and_what_is_oldest_goes_first() -> None:
    rng, most = random.Random(1), 2**17
    kept = Answers(most)
    for number in range(400):
        owner = (bytes([rng.randrange(5)]), "m")
        kept.add(owner, [number] * rng.choice([8, 100, 3000]))
        assert kept.bytes <= most
        found = kept.of(owner)
        assert found is not None and found.text[-1] == END and found.text[-2] == number
        others = [kept.of((bytes([one]), "m")) for one in range(5)]
        assert kept.bytes == sum(each.bytes for each in others if each is not None)


def test_who_was_here_longest_ago_is_forgotten_first() -> None:
    room = Answers(2 * answers.TOKEN_BYTES * FIRST)
    room.add(ALICE, range(20))
    room.add(BOB, range(20))
    assert room.of(ALICE) is not None
    room.add((b"c", "m"), range(20))
    assert room.of(BOB) is None
    assert room.of(ALICE) is not None


def test_one_owner_has_a_most() -> None:
    kept = Answers(2**30)
    for number in range(5):
        kept.add(ALICE, [number] * (answers.MOST // 2 - 1))
    found = kept.of(ALICE)
    assert found is not None
    assert len(found.text) <= answers.MOST
    assert found.text[-2] == 4


def test_short_answers_and_those_that_nobody_wants_take_no_memory() -> None:
    none, some = Answers(0), Answers(2**20)
    none.add(ALICE, range(50))
    some.add(ALICE, range(answers.LEAST - 1))
    assert none.bytes == some.bytes == 0
