"""Where a session of the router is between its workers: the states, and which follows which. Pure."""

from __future__ import annotations

from enum import Enum, auto


class State(Enum):
    NEW = auto()  # nobody has read as far as what is known: no worker has it
    SEEKING = auto()  # no verifier has it
    WAITING = auto()  # a verifier has it, and no token has come from there
    ASKED_BACK = auto()  # the same, and the verifier was asked to give it back
    GIVEN_BACK = auto()  # it did so, and no other verifier has it yet
    MOVED = (
        auto()
    )  # another has it, and no token has come from there: it moves but once, lest it go to and fro
    RUNNING = auto()  # tokens come
    OVER = auto()

    @property
    def placed(self) -> bool:
        """True if a verifier has the session."""
        return self in (State.WAITING, State.ASKED_BACK, State.MOVED, State.RUNNING)


class Event(Enum):
    READ = auto()  # its reader has had all that is known
    PLACED = auto()  # a verifier was found and told to open it
    TOKENS = auto()  # its verifier committed some
    ASKED = auto()  # another verifier has room: its own is asked to give it back
    RETURNED = auto()  # its verifier gave it back, asked to or as it leaves
    LOST = auto()  # its verifier is gone, or failed
    ENDED = auto()


_PLACED = [state for state in State if state.placed]

TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.NEW, Event.READ): State.SEEKING,
    (State.SEEKING, Event.PLACED): State.WAITING,
    (State.GIVEN_BACK, Event.PLACED): State.MOVED,
    **{(state, Event.TOKENS): State.RUNNING for state in _PLACED},
    (State.WAITING, Event.ASKED): State.ASKED_BACK,
    (State.WAITING, Event.RETURNED): State.SEEKING,
    (State.ASKED_BACK, Event.RETURNED): State.GIVEN_BACK,
    (State.MOVED, Event.RETURNED): State.GIVEN_BACK,
    (State.RUNNING, Event.RETURNED): State.SEEKING,
    **{(state, Event.LOST): State.SEEKING for state in _PLACED},
    **{(state, Event.ENDED): State.OVER for state in State},
}
