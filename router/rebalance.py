"""Decides which sessions move from verifiers that have no room for them to one that has: a pure function.

A session waits where it was placed, and a verifier that comes later, or is done with its own, would idle
beside the queue. Only sessions that have not begun there move: they lose nothing but their place in that
queue. Text that was begun elsewhere goes on with the same numerics.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from router.placement import VerifierCandidate, bounded

GROWTH_TOKENS = 16  # that a session is left room for beyond its log: a KV block, as verifiers reserve it


@dataclass(frozen=True, slots=True)
class Unbegun:
    """A session of this router whose verifier has sent no token of it."""

    at: str  # worker_id of that verifier
    tokens: int  # of its log
    most_tokens: int  # that its log may grow to
    asked_back: bool  # it is about to move
    numerics: str = ""  # of its text so far; empty = there is none


def sessions_to_move(
    sessions: Sequence[Unbegun], verifiers: Iterable[VerifierCandidate], roomy: VerifierCandidate
) -> list[int]:
    """Returns the indices of those `sessions`, which stand in the order in which they came, that `roomy` has
    room for and that wait for KV blocks at others of the `verifiers`.

    Those wait at a verifier that came there last, as prompts are begun in order; more than it says that wait
    there do not. `roomy` takes none while its report may not include all that it has."""
    if not has_room(roomy):
        return []
    full = {
        one.worker_id: one.load.waiting
        for one in verifiers
        if one.model == roomy.model and one.load.waiting > 0 and _spare(one) < 0
    }
    waiting: list[int] = []
    for worker_id, count in full.items():
        waiting += [index for index, one in enumerate(sessions) if one.at == worker_id][-count:]
    spare = _spare(roomy) - sum(one.tokens + GROWTH_TOKENS for one in sessions if one.asked_back)
    found = []
    for index in sorted(waiting):
        one = sessions[index]
        if one.asked_back or one.most_tokens > roomy.kv_tokens or one.numerics not in ("", roomy.numerics):
            continue
        spare -= one.tokens + GROWTH_TOKENS
        if spare < 0:
            break
        found.append(index)
    return found


def has_room(one: VerifierCandidate) -> bool:
    """Returns whether it may be one that others' sessions move to."""
    load = one.load
    return not load.draining and one.placed <= load.running + load.waiting and _spare(one) >= GROWTH_TOKENS


def _spare(one: VerifierCandidate) -> float:
    """Returns the tokens that its KV pool has room for beyond what its sessions hold, read next, and grow by;
    below 0 if one of them has to wait."""
    load = one.load
    free = (1 - bounded(load.kv_usage, 0.0, 1.0)) * one.kv_tokens
    return free - load.unread_prompt_tokens - (load.running + load.waiting) * GROWTH_TOKENS
