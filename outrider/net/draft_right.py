"""The right to draft for a session. One drafter after the other has it, each for a turn.

The router tells the verifier a session's draft key. It tells each drafter only what it makes of that key for
the drafter's turn. So the verifier can tell the turns apart without a message, and a drafter that was
replaced cannot take the session back from its successor.
"""

from __future__ import annotations

import hmac

TURN_BYTES = 4
PROOF_BYTES = 16
LAST_TURN: int = 2 ** (8 * TURN_BYTES) - 1


def right(draft_key: bytes, turn: int) -> bytes:
    """Returns what the drafter of that turn, counted from 0, shows to the verifier."""
    number = min(turn, LAST_TURN).to_bytes(TURN_BYTES)
    return number + hmac.digest(draft_key, number, "sha256")[:PROOF_BYTES]


def turn_of(draft_key: bytes, shown: bytes) -> int | None:
    """Returns the turn whose right this is, or None if it is no right to this session."""
    if len(shown) != TURN_BYTES + PROOF_BYTES:
        return None
    turn = int.from_bytes(shown[:TURN_BYTES])
    return turn if hmac.compare_digest(shown, right(draft_key, turn)) else None
