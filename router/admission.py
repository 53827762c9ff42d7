"""Decides who is let in: a pure function over what the verifiers said last.

A request is refused early if its first token would come too late, so that those which are in keep their
pace: the queue for KV blocks is short, and who would wait longer than the client does is told so at once.
What verifiers report may be anything; it is bounded before it counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from router.placement import VerifierCandidate, bounded

LEAST_QUEUE = 8  # sessions that may wait for KV blocks at a verifier, or half as many as run there
READING_SHARE = 0.5  # of the time in which prompts are read while others decode
LONGEST_RETRY = 60  # seconds
SMOOTHING = 0.1  # weight of one more session in how long they last
MAX_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Refusal:
    message: str
    retry_after: int  # whole seconds


NOBODY = Refusal("no target worker serves the model", 1)


@dataclass(slots=True)
class Lasting:
    """A moving average of how long sessions last, from their admission to their end."""

    seconds: float = 1.0

    def observe(self, seconds: float) -> None:
        self.seconds += SMOOTHING * (seconds - self.seconds)


def refused(
    candidates: Iterable[VerifierCandidate],
    model: str,
    prompt_tokens: int,
    patience: float,
    session_seconds: float,
    priority: int = 0,
    ahead: float = 1.0,
    most_tokens: int = 0,
    sessions: int = 1,
) -> Refusal | None:
    """Returns why a request is not let in, or None if it is: the first verifier where it comes in time
    suffices. NOBODY if none serves the model, which is for others to say. One that cannot hold
    `most_tokens` does not count, as no session is placed there.

    `patience`: seconds that it may wait for its first token. `session_seconds`: that a session lasts.
    `priority`: one that gives way to others takes no place in a queue. `ahead`: of what waits at a verifier,
    the share whose turn comes before this one's. `sessions`: that begin together, and read `prompt_tokens`.
    """
    soonest = first_token = math.inf  # of all, and of those whose queue is not full
    for one in candidates:
        if one.model != model or one.load.draining or not one.holds(most_tokens):
            continue
        seconds, queue_full = _wait(one, prompt_tokens, session_seconds, priority == 0, ahead, sessions)
        if not queue_full and seconds <= patience:
            return None
        soonest = min(soonest, seconds)
        first_token = first_token if queue_full else min(first_token, seconds)
    if soonest == math.inf:
        return NOBODY
    if first_token == math.inf:
        return Refusal("every target worker has a full queue; try again later", retry_after(soonest))
    return Refusal(
        f"the first token would come after some {first_token:.1f} seconds, and the client waits "
        f"{max(patience, 0.0):.1f}: try again later, or with a longer timeout",
        retry_after(first_token - patience),
    )


def share_ahead(sessions: Mapping[str, int], owner: str) -> float:
    """Returns of all sessions the share whose turn comes before that of the owner's next one: owners have
    turns, so of each other's there are no more than of its own.

    `sessions`: of this router, by owner; "" = keys are not asked for."""
    own, everyone = sessions.get(owner, 0), sum(sessions.values())
    if not everyone:  # others may have some at other routers
        return 0.0 if owner else 1.0
    return sum(min(one, own + 1) for one in sessions.values()) / everyone


def retry_after(seconds: float) -> int:
    """Returns the whole seconds after which a client is told to come back."""
    return min(max(math.ceil(seconds), 1), LONGEST_RETRY)


def _wait(
    one: VerifierCandidate,
    prompt_tokens: int,
    session_seconds: float,
    may_queue: bool,
    ahead: float,
    sessions: int,
) -> tuple[float, bool]:
    """Returns the seconds until the last of so many new sessions has its first token there, about, and if the
    queue is full."""
    load = one.load
    needed = max(prompt_tokens - one.cached_tokens, sessions)
    free = (1 - bounded(load.kv_usage, 0.0, 1.0)) * one.kv_tokens
    unreported = max(one.placed - load.running - load.waiting, one.unreported)  # placed since it came
    coming = ahead * unreported + sessions  # each of which is taken for one like these
    unread = ahead * load.unread_prompt_tokens + coming * needed / sessions
    # Those without blocks yet, this one included. As far as there is room they only wait for a step, also
    # where a verifier told of them as waiting: it may have told so in the moment in which others ended.
    pending = ahead * load.waiting + coming
    starting = min(int(pending * free / unread), pending)
    queued = pending - starting
    # Every so often one of those that run ends, and one that waits takes its place.
    until_started = queued * session_seconds / max(load.running + starting, 1)
    share = READING_SHARE if load.running else 1.0
    reading = unread * bounded(load.prompt_token_seconds, 0.0, 1.0) / share
    step = bounded(load.typical_step_seconds, 0.0, MAX_SECONDS)
    queue_full = queued > (max(LEAST_QUEUE, load.running // 2) if may_queue else 0)
    return min(until_started + reading + step, MAX_SECONDS), queue_full
