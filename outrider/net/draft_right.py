"""The right to draft for a session. A session has a few seats; at each one drafter after the other has the
right, for a turn.

The router tells the verifier a session's draft key. It tells each drafter only what it makes of that key for
the drafter's seat and turn. So the verifier can tell seats and turns apart without a message, and a drafter
that was replaced cannot take the seat back from its successor, nor take another's.
"""

from __future__ import annotations

import hmac
from typing import NamedTuple

MOST_SEATS = 4  # drafters of a session at a time
TURN_BYTES = 4
PROOF_BYTES = 16
LAST_TURN: int = 2 ** (8 * TURN_BYTES) - 1


class Right(NamedTuple):
    seat: int  # from 0
    turn: int


def right(draft_key: bytes, turn: int, seat: int = 0) -> bytes:
    """Returns what the drafter of that turn, counted from 0, shows to the verifier."""
    place = bytes([seat]) + min(turn, LAST_TURN).to_bytes(TURN_BYTES)
    return place + hmac.digest(draft_key, place, "sha256")[:PROOF_BYTES]


def right_of(draft_key: bytes, shown: bytes) -> Right | None:
    """Returns which right this is, or None if it is no right to this session. An empty key gives none."""
    if not draft_key or len(shown) != 1 + TURN_BYTES + PROOF_BYTES or shown[0] >= MOST_SEATS:
        return None
    seat, turn = shown[0], int.from_bytes(shown[1 : 1 + TURN_BYTES])
    return Right(seat, turn) if hmac.compare_digest(shown, right(draft_key, turn, seat)) else None
