"""Who is let in, by what the verifiers said."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from outrider.wire.load import VerifierLoad
from router.admission import (
    LEAST_QUEUE,
    LONGEST_RETRY,
    NOBODY,
    Lasting,
    Refusal,
    refused,
    retry_after,
    share_ahead,
)
from router.placement import VerifierCandidate

QUEUE_FULL = "full queue"


def verifier(*, model: str = "m", placed: int = 0, room: int = 10_000, cached: int = 0, **load: Any) -> Any:
    load.setdefault("unread_prompt_tokens", 100 * load.get("waiting", 0))
    loaded = dataclasses.replace(VerifierLoad(), **load)
    return VerifierCandidate("v", model, loaded, placed, room, cached)


def verdict(*candidates: Any, prompt: int = 100, patience: float = math.inf, lasting: float = 2.0) -> Any:
    return refused(candidates, "m", prompt, patience, lasting)


def test_an_idle_verifier_takes_everybody() -> None:
    assert verdict(verifier()) is None
    assert verdict(verifier(), patience=0.1) is None


def test_who_has_few_sessions_is_let_in_beside_a_queue_of_one_who_has_many() -> None:
    """As its turn comes first: by its place in the queue, and by the time that it waits."""
    full = verifier(running=10, waiting=100, kv_usage=0.995, prompt_token_seconds=0.001)
    sessions = {"alice": 100, "bob": 0}
    assert QUEUE_FULL in refused([full], "m", 100, 5.0, 1.0, ahead=share_ahead(sessions, "alice")).message
    assert refused([full], "m", 100, 5.0, 1.0, ahead=share_ahead(sessions, "bob")) is None
    assert refused([full], "m", 100, 0.1, 1.0, ahead=share_ahead(sessions, "bob")) is not None


def test_of_each_others_sessions_as_many_are_ahead_as_of_ones_own() -> None:
    assert share_ahead({"alice": 7, "bob": 1, "carol": 2}, "bob") == 5 / 10  # 2, 1 and 2
    assert share_ahead({"alice": 7}, "bob") == 1 / 7
    assert share_ahead({"": 7}, "") == share_ahead({}, "") == share_ahead({"alice": 3}, "alice") == 1
    assert share_ahead({}, "bob") == 0  # those of others are at other routers


def test_where_nobody_serves_the_model_others_say_so() -> None:
    assert verdict() is NOBODY
    assert verdict(verifier(model="n"), verifier(draining=True)) is NOBODY


def test_many_that_run_are_no_queue() -> None:
    assert verdict(verifier(running=200, placed=200, kv_usage=0.5)) is None


def test_room_at_a_verifier_that_cannot_hold_a_session_lets_nobody_in() -> None:
    """It is not placed there: it would wait at the full one without end."""
    full, small = verifier(running=10, waiting=LEAST_QUEUE, kv_usage=0.995), verifier(room=500)

    def asks(most_tokens: int) -> Any:
        return refused([full, small], "m", 100, math.inf, 2.0, most_tokens=most_tokens)

    assert asks(500) is None
    assert QUEUE_FULL in asks(501).message


def test_those_that_have_just_come_are_no_queue_as_far_as_there_is_room() -> None:
    def just_opened(unread: int) -> Any:  # 9,000 tokens find room
        return verifier(running=4, waiting=5 * LEAST_QUEUE, kv_usage=0.1, unread_prompt_tokens=unread)

    assert verdict(just_opened(8_000)) is None
    assert verdict(just_opened(11_000)) is None  # of 41, 33 start
    assert QUEUE_FULL in verdict(just_opened(11_200)).message


def test_a_full_queue_refuses_at_one_verifier_and_not_where_another_has_room() -> None:
    full = verifier(running=10, waiting=LEAST_QUEUE, kv_usage=0.995)
    assert QUEUE_FULL in verdict(full).message
    assert verdict(full, verifier(running=10, waiting=LEAST_QUEUE - 1, kv_usage=0.995)) is None
    assert QUEUE_FULL in verdict(full, verifier(draining=True)).message
    assert verdict(verifier(running=40, waiting=LEAST_QUEUE, kv_usage=0.995)) is None
    assert QUEUE_FULL in verdict(verifier(running=40, waiting=20, kv_usage=0.995)).message


def test_what_was_placed_since_the_last_report_counts() -> None:
    full = {"running": 1, "kv_usage": 0.995}
    assert verdict(verifier(placed=LEAST_QUEUE + 1, **full)) == Refusal(
        "every target worker has a full queue; try again later", 18
    )
    assert verdict(verifier(placed=LEAST_QUEUE, **full)) is None


def test_of_many_that_come_at_once_those_that_find_room_are_no_queue() -> None:
    def room_for_six(placed: int, **load: Any) -> Any:
        return verifier(room=600, placed=placed, **load)

    assert verdict(room_for_six(5 + LEAST_QUEUE)) is None
    assert QUEUE_FULL in verdict(room_for_six(6 + LEAST_QUEUE)).message
    # The verifier told of them in the moment in which others had ended.
    assert verdict(room_for_six(5 + LEAST_QUEUE, waiting=5 + LEAST_QUEUE)) is None
    assert QUEUE_FULL in verdict(room_for_six(6 + LEAST_QUEUE, waiting=6 + LEAST_QUEUE)).message
    # Six start and one waits: until one of those ends.
    assert verdict(room_for_six(6), patience=0.51, lasting=3.0) is None
    assert "some 0.5 seconds" in verdict(room_for_six(6), patience=0.49, lasting=3.0).message


def test_a_cached_prompt_needs_no_room_of_its_own() -> None:
    waiting = {"running": 10, "waiting": 2 * LEAST_QUEUE, "kv_usage": 0.995, "unread_prompt_tokens": 32}
    assert verdict(verifier(**waiting, cached=90), prompt=100) is None
    assert QUEUE_FULL in verdict(verifier(**waiting), prompt=100).message


def test_who_cannot_get_the_first_token_in_time_is_told_how_long_it_takes() -> None:
    reading = verifier(unread_prompt_tokens=900, prompt_token_seconds=0.01)  # 10 s with the prompt's own
    refusal = verdict(reading, patience=4.0)
    assert "some 10.0 seconds" in refusal.message and "waits 4.0" in refusal.message
    assert refusal.retry_after == 6
    assert verdict(reading, patience=11.0) is None
    assert verdict(reading, verifier(), patience=4.0) is None
    assert verdict(reading, patience=11.0, prompt=300).retry_after == 1


def test_others_that_decode_slow_a_prompt_down() -> None:
    busy = verifier(running=1, unread_prompt_tokens=900, prompt_token_seconds=0.01)
    assert verdict(busy, patience=11.0).retry_after == 9


def test_the_wait_for_blocks_counts() -> None:
    queued = verifier(running=4, waiting=7, kv_usage=0.999)
    assert verdict(queued, patience=3.9, lasting=2.0).retry_after == 1
    assert verdict(queued, patience=4.1, lasting=2.0) is None


def test_a_deadline_that_has_passed_is_never_met() -> None:
    assert verdict(verifier(), patience=-1.0) is not None


def test_times_to_come_back_are_whole_and_bounded() -> None:
    assert [retry_after(seconds) for seconds in (0.0, 0.2, 1.0, 1.1, 1e9)] == [1, 1, 1, 2, LONGEST_RETRY]


def test_how_long_sessions_last_follows_what_they_do() -> None:
    lasting = Lasting()
    for _ in range(100):
        lasting.observe(20.0)
    assert 19.0 < lasting.seconds <= 20.0


anything = st.floats(allow_nan=True, allow_infinity=True)
counts = st.integers(0, 2**32 - 1)


@given(anything, anything, anything, counts, counts, counts, st.floats(0, 1e6))
def test_whatever_a_verifier_reports_there_is_a_verdict(
    kv: float, step: float, token: float, running: int, waiting: int, unread: int, patience: float
) -> None:
    one = verifier(
        kv_usage=kv,
        typical_step_seconds=step,
        prompt_token_seconds=token,
        running=running,
        waiting=waiting,
        unread_prompt_tokens=unread,
    )
    refusal = verdict(one, patience=patience)
    assert refusal is None or 1 <= refusal.retry_after <= LONGEST_RETRY


def test_sessions_that_begin_together_have_room_if_what_they_read_together_has() -> None:
    idle = verifier(room=3000)
    assert refused([idle], "m", 1500 + 63 * 16, math.inf, 2.0, sessions=64) is None
    assert QUEUE_FULL in refused([idle], "m", 64 * 1500, math.inf, 2.0, sessions=64).message
    reading = verifier(room=10**6, prompt_token_seconds=0.001)
    assert refused([reading], "m", 2500, 3.0, 2.0, sessions=64) is None
    assert "after some 6.0 seconds" in refused([reading], "m", 6000, 3.0, 2.0, sessions=64).message
