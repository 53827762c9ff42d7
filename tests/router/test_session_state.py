"""The states of a session, and which follows which."""

from __future__ import annotations

import pytest

from router.session_state import TRANSITIONS, Event, State

BEGUN = [Event.READ, Event.PLACED]
AGAIN = [*BEGUN, Event.ASKED, Event.RETURNED, Event.PLACED]
LIVES = {
    "as usual": ([*BEGUN, Event.TOKENS, Event.TOKENS, Event.ENDED], State.OVER),
    "its verifier is lost": ([*BEGUN, Event.TOKENS, Event.LOST, Event.PLACED], State.WAITING),
    "it moves for want of room": (AGAIN, State.MOVED),
    "asked too late": ([*BEGUN, Event.ASKED, Event.TOKENS], State.RUNNING),
    "the second one leaves, too": ([*AGAIN, Event.RETURNED, Event.PLACED], State.MOVED),
    "the second one is lost": ([*AGAIN, Event.LOST, Event.PLACED], State.WAITING),
}


@pytest.mark.parametrize("life", LIVES)
def test_a_life(life: str) -> None:
    events, end = LIVES[life]
    state = State.NEW
    for event in events:
        state = TRANSITIONS[state, event]
    assert state is end


def test_every_state_can_be_reached_and_left_but_the_last() -> None:
    reached, found = {State.NEW}, {State.NEW}
    while found:
        found = {after for (before, _), after in TRANSITIONS.items() if before in reached} - reached
        reached |= found
    assert reached == set(State)
    assert {after for (before, _), after in TRANSITIONS.items() if before is State.OVER} == {State.OVER}


def test_a_verifier_is_asked_once_and_only_for_what_has_waited_at_its_first() -> None:
    assert [before for before, event in TRANSITIONS if event is Event.ASKED] == [State.WAITING]


def test_all_that_comes_from_a_verifier_comes_to_a_session_that_has_one() -> None:
    for event in (Event.TOKENS, Event.RETURNED, Event.LOST):
        assert {before for before, at in TRANSITIONS if at is event} == {
            each for each in State if each.placed
        }
