"""The clients of a storm notice whatever is lost, doubled or different."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.chaos.clients import Broken, Different, GrpcStream, HttpStream, Lost, Record, Stream, _broken

CASE = {
    "prompt": [1],
    "tokens": [5, 6, 7, 7, 8],
    "text": "abccd",
    "sampling": {},
    "num_speculative_tokens": None,
}


def stream(kind: type[Any]) -> Any:
    return kind(CASE, Record(kind.client, 0, time.monotonic()), 2, 0)


def test_tokens_are_compared_one_by_one() -> None:
    one = stream(GrpcStream)
    at = one._take(0, [5, 6])
    at = one._take(at, [])
    assert one._take(at, [7, 7, 8]) == one.record.tokens == 5
    one.finish(5)


@pytest.mark.parametrize(
    ("at", "tokens"),
    [(0, [6]), (2, [7, 8]), (4, [8, 8]), (1, [5, 6])],
    ids=["one is missing", "one is lost in between", "one too many", "one is doubled"],
)
def test_what_is_not_the_reference_is_different(at: int, tokens: list[int]) -> None:
    with pytest.raises(Different):
        stream(GrpcStream)._take(at, tokens)


def test_tokens_that_come_again_after_the_log_was_lost_count_once() -> None:
    one = stream(GrpcStream)
    one._take(0, [5, 6, 7])
    one._take(0, [5, 6])
    assert one.record.tokens == 3


@pytest.mark.parametrize("told", [4, 6])
def test_an_end_with_another_number_of_tokens_is_different(told: int) -> None:
    one = stream(GrpcStream)
    one._take(0, CASE["tokens"])  # type: ignore[arg-type]
    with pytest.raises(Different):
        one.finish(told)


def test_an_end_before_all_has_come_is_different() -> None:
    one = stream(GrpcStream)
    one._take(0, [5, 6])
    with pytest.raises(Different):
        one.finish(5)


def chunk(text: str) -> dict[str, Any]:
    return {"choices": [{"text": text}]}


def test_text_is_compared_as_it_comes() -> None:
    one = stream(HttpStream)
    one._last_id = "ab:2"
    one._take(chunk("ab"))
    assert one.record.tokens == 2
    with pytest.raises(Different):
        one._take(chunk("d"))


@pytest.mark.parametrize("text", ["abcd", "ba", "abccdd"])
def test_text_that_is_not_the_reference_is_different(text: str) -> None:
    with pytest.raises(Different):
        stream(HttpStream)._take(chunk(text))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("UNAVAILABLE", Broken),
        ("503", Broken),
        ("ABORTED", Broken),
        ("NOT_FOUND", Lost),
        ("404", Lost),
        ("INTERNAL", Different),
        ("400", Different),
        ("500", Different),
    ],
)
def test_what_a_refusal_means(code: str, kind: type[Exception]) -> None:
    assert isinstance(_broken(code, "why"), kind)


async def test_a_stream_goes_to_the_other_router_until_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.chaos.clients.PAUSE_SECONDS", 0.0)
    asked: list[tuple[int, str]] = []

    class Scripted(Stream):
        client = "scripted"

        async def attempt(self, router: int) -> None:
            asked.append((router, self.id))
            if len(asked) == 1:
                raise Broken("UNAVAILABLE")  # before it has an id
            self.id = "known"
            if len(asked) == 2:
                raise Broken("UNAVAILABLE")
            if len(asked) == 3:
                raise Lost("?")

    one = stream(Scripted)
    await one.run()
    first = asked[0][0]
    assert asked == [(first, ""), (1 - first, ""), (first, "known"), (1 - first, "")]
    record = one.record
    assert (record.resumptions, record.repeats, record.logs_lost, record.error) == (1, 2, 1, None)


async def test_a_stream_that_is_different_is_not_asked_again() -> None:
    class Wrong(Stream):
        async def attempt(self, router: int) -> None:
            raise Different("at 3")

    one = stream(Wrong)
    await one.run()
    assert one.record.error == "different: at 3"
