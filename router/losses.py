"""How sessions end before their text does: how often one may lose its verifier, and what else ends it. Pure.

Where many verifiers go at once, a session may be moved to several that are gone before anybody knows. That
says nothing of the session. What it dies of itself kills one verifier after another.
"""

from __future__ import annotations

from outrider.errors import Cancelled, Unavailable

RESUME_SECONDS = 60.0  # a session that has no verifier waits so long for one
MAX_LOSSES = 3  # that lie apart, without a token gained
APART_SECONDS = 2.0  # in which who has gone is noticed: as many as go at once are one loss


class Losses:
    def __init__(self) -> None:
        self._count = 0
        self._last: float | None = None  # when; None = none since the last committed token

    def gained(self) -> None:
        """The session has committed a token."""
        self._count, self._last = 0, None

    def lost(self, now: float) -> float:
        """Notes a loss. Returns the seconds after which the session goes on at another verifier: at once
        after the first loss, and then not before APART_SECONDS have passed."""
        last, self._last = self._last, now
        if last is None or now - last >= APART_SECONDS:
            self._count += 1
        return 0.0 if last is None else APART_SECONDS

    @property
    def too_many(self) -> Unavailable | None:
        """Returns the session's end if the request itself may be the cause; else None."""
        if self._count <= MAX_LOSSES:
            return None
        return Unavailable(f"{self._count} target workers in a row were lost on this request")


def none_came(missing: str, served: bool) -> Unavailable:
    """Returns the end of a session that has waited so long. `missing`: what it waited for. `served`: whether
    some verifier had it before."""
    if not served:
        return Unavailable(f"no target worker came within {RESUME_SECONDS:g} seconds; send it again{missing}")
    return Unavailable(
        "the target worker that served this request was lost, and none came in its place within "
        f"{RESUME_SECONDS:g} seconds; resume it later, or send it again{missing}"
    )


def lost_track() -> Unavailable:
    """Returns what a session ends with whose verifier said what no sound one says, if there is no other."""
    return Unavailable("the target worker lost track of this request; send it again")


def no_room() -> Unavailable:
    """Returns what a session ends with that has waited for too long behind others, if there is no other
    verifier."""
    return Unavailable("the target worker has had no room for this request for too long; send it again later")


def cancelled() -> Cancelled:
    return Cancelled("the request was cancelled")
