"""What is remembered of the prompts that were placed."""

from hypothesis import given
from hypothesis import strategies as st

from router.prefixes import PlacedPrefixes

tokens = st.lists(st.integers(0, 2), max_size=20)


@given(st.lists(tokens, max_size=6), tokens)
def test_the_match_is_the_longest_common_beginning_in_whole_blocks(
    placed: list[list[int]], prompt: list[int]
) -> None:
    prefixes = PlacedPrefixes(blocks=1000, block_size=4)
    for one in placed:
        prefixes.place(one)
    expected = 0
    for length in range(4, len(prompt) + 1, 4):
        if any(one[:length] == prompt[:length] and len(one) >= length for one in placed):
            expected = length
    assert prefixes.match(prompt) == expected


def test_what_was_placed_under_another_salt_is_not_there() -> None:
    prefixes = PlacedPrefixes(blocks=1000, block_size=2)
    prefixes.place([1, 1, 2, 2], b"alice")
    assert [prefixes.match([1, 1, 2, 2], salt) for salt in (b"alice", b"bob", b"")] == [4, 0, 0]


def test_the_oldest_prompt_is_forgotten_first_and_its_end_before_its_beginning() -> None:
    prefixes = PlacedPrefixes(blocks=3, block_size=2)
    prefixes.place([1, 1, 2, 2])
    prefixes.place([3, 3])
    prefixes.place([4, 4])
    assert prefixes.match([1, 1, 2, 2]) == 2
    prefixes.place([1, 1])  # in use again
    prefixes.place([5, 5])
    assert [prefixes.match([n, n]) for n in (1, 3, 4, 5)] == [2, 0, 2, 2]


def test_a_worker_that_claims_to_have_no_blocks_is_matched_by_nothing() -> None:
    prefixes = PlacedPrefixes(blocks=0, block_size=0)
    prefixes.place([1, 2, 3])
    assert prefixes.match([1, 2, 3]) == 0
