"""How long a client waits, as headers say it."""

from __future__ import annotations

import pytest

from outrider.errors import InvalidRequest
from router.api.deadline import TimeLimits, time_limits

NOW = 1000.0


def limits(streamed: bool = False, **headers: str) -> TimeLimits:
    return time_limits({name.replace("_", "-"): value for name, value in headers.items()}, streamed, NOW)


def test_without_a_header_there_is_no_limit() -> None:
    assert limits() == TimeLimits(None, None)


def test_ours_is_for_the_whole_answer() -> None:
    for streamed in (False, True):
        assert limits(streamed, x_request_timeout="2.5") == TimeLimits(1002.5, 1002.5)


@pytest.mark.parametrize("name", ["x_stainless_timeout", "x_stainless_read_timeout"])
def test_an_sdk_ends_its_request_itself(name: str) -> None:
    """It is neither refused early nor ended before that."""
    assert limits(False, **{name: "600.0"}) == TimeLimits(None, 1601.0)
    assert limits(True, **{name: "600"}) == TimeLimits(None, None)


def test_the_shortest_counts() -> None:
    both = {"x_request_timeout": "30", "x_stainless_read_timeout": "10"}
    assert limits(True, **both) == TimeLimits(1030.0, 1030.0)
    assert limits(False, **both) == TimeLimits(1030.0, 1011.0)


@pytest.mark.parametrize("value", ["soon", "", "0", "-1", "nan"])
def test_a_bad_one_of_ours_is_refused_by_name_and_an_sdks_is_ignored(value: str) -> None:
    with pytest.raises(InvalidRequest, match="x-request-timeout must be a number of seconds"):
        limits(x_request_timeout=value)
    assert limits(x_stainless_timeout=value) == TimeLimits(None, None)


def test_without_end_is_no_limit() -> None:
    assert limits(x_request_timeout="inf") == TimeLimits(None, None)
