"""What is remembered of the prompts that were placed."""

import random

from hypothesis import given
from hypothesis import strategies as st

from router.prefixes import DEEPEST, MOST_HOLDERS, PlacedPrefixes, PrefixHolders, PromptBlocks, block_hashes

tokens = st.lists(st.integers(0, 2), max_size=20)


@given(st.lists(tokens, max_size=6), tokens)
def test_the_match_is_the_longest_common_beginning_in_whole_blocks(
    placed: list[list[int]], prompt: list[int]
) -> None:
    prefixes = PlacedPrefixes(blocks=1000, block_size=4)
    for one in placed:
        prefixes.place(block_hashes(one, 4))
    expected = 0
    for length in range(4, len(prompt) + 1, 4):
        if any(one[:length] == prompt[:length] and len(one) >= length for one in placed):
            expected = length
    assert prefixes.match(block_hashes(prompt, 4)) == expected


def test_what_was_placed_under_another_salt_is_not_there() -> None:
    prefixes = PlacedPrefixes(blocks=1000, block_size=2)
    prefixes.place(block_hashes([1, 1, 2, 2], 2, b"alice"))
    salts = (b"alice", b"bob", b"")
    assert [prefixes.match(PromptBlocks([1, 1, 2, 2], salt).of(2)) for salt in salts] == [4, 0, 0]


def test_the_oldest_prompt_is_forgotten_first_and_its_end_before_its_beginning() -> None:
    prefixes = PlacedPrefixes(blocks=3, block_size=2)
    prefixes.place(block_hashes([1, 1, 2, 2], 2))
    prefixes.place(block_hashes([3, 3], 2))
    prefixes.place(block_hashes([4, 4], 2))
    assert prefixes.match(block_hashes([1, 1, 2, 2], 2)) == 2
    prefixes.place(block_hashes([1, 1], 2))  # in use again
    prefixes.place(block_hashes([5, 5], 2))
    assert [prefixes.match(block_hashes([n, n], 2)) for n in (1, 3, 4, 5)] == [2, 0, 2, 2]


def test_a_worker_that_claims_to_have_no_blocks_is_matched_by_nothing() -> None:
    prefixes = PlacedPrefixes(blocks=0, block_size=0)
    prefixes.place(block_hashes([1, 2, 3], 0))
    assert prefixes.match(block_hashes([1, 2, 3], 0)) == 0


def test_those_that_hold_most_of_a_prompt_are_found_first_and_but_a_few() -> None:
    holders = PrefixHolders()
    for number in range(10):
        holders.place([1], f"one {number}")
    holders.place([1, 2], "two")
    holders.place([1, 2, 3], "three")
    assert holders.find([1, 2, 3, 4]) == ["three", "two", "one 9", "one 8"]
    assert holders.find([1, 2]) == ["three", "two", "one 9", "one 8"]
    assert len(holders.find([1])) == MOST_HOLDERS
    assert holders.find([5, 1]) == holders.find([]) == []


def test_what_is_remembered_of_holders_is_bounded() -> None:
    holders = PrefixHolders(most_blocks=3)
    holders.place([1, 2], "a")
    holders.place([3, 4], "b")
    assert (holders.find([1, 2]), holders.find([3, 4])) == (["a"], ["b"])
    assert len(holders._holders) == 3
    deep = list(range(10, 11 + DEEPEST))
    PrefixHolders().place(deep, "c")
    assert holders.find(deep) == []


def test_a_prompt_is_hashed_once_for_each_size_of_block() -> None:
    class Counted(list[int]):
        read = 0

        def __getitem__(self, place):  # type: ignore[no-untyped-def]
            self.read += 1
            return super().__getitem__(place)

    tokens = Counted(random.Random(1).randrange(50) for _ in range(64))
    blocks = PromptBlocks(tokens)
    assert blocks.of(16) == blocks.of(16) == block_hashes(list(tokens), 16)
    assert tokens.read == 4
