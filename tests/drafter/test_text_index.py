"""The place most like a text's end, against a scan of the whole text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.text_index import LONGEST, PLACES, SHORTEST, TextIndex

texts = st.lists(st.integers(0, 3), max_size=40)  # few different tokens: many places are alike


def scanned(text: list[int]) -> tuple[int, int] | None:
    """What longest_match returns, by comparing the end with every place before it."""
    best: tuple[int, int] | None = None
    places = 0
    for end in range(len(text) - 2, SHORTEST - 2, -1):
        length = 0
        while length < min(LONGEST, end + 1) and text[end - length] == text[len(text) - 1 - length]:
            length += 1
        if length >= SHORTEST:
            places += 1
            if places <= PLACES and length > (best[1] if best else 0):
                best = end + 1, length
    return best


@given(texts, texts)
@settings(max_examples=300, deadline=None)
def test_the_index_finds_what_a_scan_finds(prompt: list[int], output: list[int]) -> None:
    text = list(prompt)
    index = TextIndex(text, 2**16)  # so large that no two pairs share a key
    assert index.longest_match() == scanned(text)
    for token in output:
        text.append(token)
        index.extended()
        assert index.longest_match() == scanned(text)


@given(texts, st.integers(1, 8))
@settings(max_examples=200, deadline=None)
def test_pairs_that_share_a_key_are_told_apart(text: list[int], capacity: int) -> None:
    found = TextIndex(text, capacity).longest_match()
    if found is not None:
        after, length = found
        assert length >= SHORTEST
        assert text[after - length : after] == text[-length:]


def test_the_latest_of_many_places_are_looked_at() -> None:
    text = [9, 9, 9, 1, 2, 5, *[1, 2, 4] * PLACES, 9, 9, 9, 1, 2]
    found = TextIndex(text, 2**16).longest_match()
    assert found == (len(text) - 6, 2)  # the longest stands before PLACES others
