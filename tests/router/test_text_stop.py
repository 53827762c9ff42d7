from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.stop import StopStrings

TEXT = st.text("ab", max_size=30)  # a tiny alphabet: stop strings overlap themselves and one another
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """The first end of the text that ends in a stop string, minus the longest one there."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def run(text: str, stops: list[str], cuts: list[int]) -> tuple[list[str], bool]:
    matcher = StopStrings(tuple(stops)).matcher()
    ends = sorted(min(cut, len(text)) for cut in cuts)
    out = []
    for start, end in zip([0, *ends], [*ends, len(text)], strict=True):
        out.append(matcher.push(text[start:end]))
        if matcher.stopped:
            return out, True
    return [*out, matcher.flush()], False


@settings(max_examples=500)
@given(TEXT, STOPS, st.lists(st.integers(0, 30), max_size=8))
@example("aaab", ["aab"], [])
@example("abababb", ["ababb", "bb"], [3])
def test_equals_a_search_of_the_whole_text_however_it_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    out, stopped = run(text, stops, cuts)
    assert ("".join(out), stopped) == naive(text, stops)


@given(TEXT, STOPS)
def test_never_withholds_more_than_could_still_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher, seen, shown = StopStrings(tuple(stops)).matcher(), "", ""
    for character in text:
        seen += character
        shown += matcher.push(character)
        if matcher.stopped:
            return
        held = seen[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_over_many_deltas_leaks_nothing() -> None:
    matcher = StopStrings(("<|end|>",)).matcher()
    assert [matcher.push(piece) for piece in ("Hi <", "|e", "nd", "|", "> more")] == ["Hi ", "", "", "", ""]
    assert matcher.stopped


def test_what_was_no_stop_string_is_given_back() -> None:
    matcher = StopStrings(("<|end|>",)).matcher()
    assert [matcher.push(piece) for piece in ("<|e", "n", "g")] == ["", "", "<|eng"]
    assert matcher.push("<|") == ""
    assert matcher.flush() == "<|"
    assert not matcher.stopped


@given(TEXT, STOPS, st.integers(0, 30), st.booleans())
def test_nothing_stops_before_its_time(text: str, stops: list[str], least: int, included: bool) -> None:
    """As a search whose first matches do not count."""
    matcher, shown, expected, stopped = StopStrings(tuple(stops)).matcher(included), "", text, False
    for end in range(1, len(text) + 1):
        shown += matcher.push(text[end - 1], end > least)
        found = max((stop for stop in stops if text[:end].endswith(stop)), key=len, default="")
        if found and end > least:
            expected, stopped = text[: end if included else end - len(found)], True
            break
    assert (shown + matcher.flush(), matcher.stopped) == (expected, stopped)
