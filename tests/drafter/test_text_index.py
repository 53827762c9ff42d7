"""The places that are like a text's end, against a scan of the whole text."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.text_index import LONGEST, PLACES, SHORTEST, TextIndex

texts = st.lists(st.integers(0, 3), max_size=40)  # few different tokens: many places are alike


def scanned(text: list[int], tail: list[int], shortest: int = SHORTEST) -> list[tuple[int, int]]:
    """What `matches` returns, by comparing the tail with every place that something follows."""
    found = []
    for end in range(len(text) - 2, shortest - 2, -1):
        length = 0
        while length < min(LONGEST, end + 1, len(tail)) and text[end - length] == tail[-1 - length]:
            length += 1
        if length >= shortest:
            found.append((end + 1, length))
    return found[:PLACES]


@given(texts, texts)
@settings(max_examples=300, deadline=None)
def test_the_index_finds_what_a_scan_finds(prompt: list[int], output: list[int]) -> None:
    text = list(prompt)
    index = TextIndex(text, 2**16)  # so large that no two pairs share a key
    assert index.matches(text) == scanned(text, text)
    for token in output:
        text.append(token)
        index.extended()
        assert index.matches(text) == scanned(text, text)


@given(texts, texts, st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_the_end_of_another_text_is_found_too(text: list[int], other: list[int], shortest: int) -> None:
    index = TextIndex(array("I", text), 2**16, shortest)
    assert index.matches(other) == scanned(text, other, shortest)


@given(texts, st.integers(1, 8))
@settings(max_examples=200, deadline=None)
def test_pairs_that_share_a_key_are_told_apart(text: list[int], capacity: int) -> None:
    for after, length in TextIndex(text, capacity).matches(text):
        assert length >= SHORTEST
        assert text[after - length : after] == text[-length:]


def test_the_latest_of_many_places_are_looked_at() -> None:
    text = [9, 9, 9, 1, 2, 5, *[1, 2, 4] * PLACES, 9, 9, 9, 1, 2]
    found = TextIndex(text, 2**16).matches(text)
    assert found[0] == (len(text) - 6, 2)
    assert len(found) == PLACES  # the longest stands before them
