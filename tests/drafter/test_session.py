"""What a commit does to a draft."""

from __future__ import annotations

import pytest

from drafter.session import DraftSession, DraftSpec, LogConflict
from outrider.sampling.params import SamplingParams


def drafting(drafted: list[int], *, window: int = 8, max_tokens: int = 20) -> DraftSession:
    session = DraftSession(
        DraftSpec(b"s" * 16, (1, 2, 3), (), SamplingParams(), max_tokens, b"", 100), window
    )
    session.drafted = drafted
    return session


def test_what_the_target_confirmed_stays_and_drafting_goes_on_from_there() -> None:
    s = drafting([10, 11, 12])
    assert s.apply(3, [10, 11]) == 6
    assert (s.log, s.drafted) == ([1, 2, 3, 10, 11], [12])


def test_at_the_first_difference_the_rest_of_the_draft_goes() -> None:
    s = drafting([10, 11, 12])
    assert s.apply(3, [10, 50]) == 4
    assert (s.log, s.drafted) == ([1, 2, 3, 10, 50], [])


def test_a_commit_longer_than_the_draft() -> None:
    s = drafting([10])
    assert s.apply(3, [10, 11]) == 4
    assert (s.log, s.drafted) == ([1, 2, 3, 10, 11], [])


def test_a_repeated_commit_changes_nothing() -> None:
    s = drafting([10, 11, 12])
    s.apply(3, [10])
    assert s.apply(3, [10]) == 6
    assert (s.log, s.drafted) == ([1, 2, 3, 10], [11, 12])


def test_a_commit_beyond_the_log_waits_for_the_one_that_was_lost() -> None:
    s = drafting([10, 11])
    assert s.apply(4, [11]) == 5
    assert (s.log, s.drafted) == ([1, 2, 3], [10, 11])


def test_a_commit_that_contradicts_the_log_is_an_error() -> None:
    s = drafting([])
    s.apply(3, [10])
    with pytest.raises(LogConflict, match="position 3"):
        s.apply(3, [11])


def test_no_draft_goes_past_the_window_or_the_last_token_that_needs_one() -> None:
    assert not drafting([10, 11], window=2).wants_token
    assert drafting([10], window=2).wants_token
    assert drafting([], max_tokens=2).wants_token
    assert not drafting([10], max_tokens=2).wants_token  # the second output token is the target's own


def test_the_tokens_to_catch_up_on() -> None:
    s = drafting([10, 11])
    assert s.uncached(0) == [1, 2, 3, 10, 11]
    assert s.uncached(2) == [3, 10, 11]
    assert s.uncached(4) == [11]
