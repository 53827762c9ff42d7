"""How busy workers say that they are: plain data. The zeros stand for "not measured yet"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

WORTH_TELLING = 0.1  # by which a share, or a pace against what it was, must have changed to be news


@dataclass(frozen=True, slots=True)
class VerifierLoad:
    """How busy a verifier is, with its hello and with every batch of events."""

    running: int = 0  # sessions in the decode batch or being prefilled
    waiting: int = 0  # sessions that wait for KV blocks
    kv_usage: float = 0.0  # share of KV blocks held, or if it is more of places for sessions, 0..1
    step_seconds: float = 0.0  # the last step's duration
    step_tokens: int = 0  # tokens in the last step
    price: float = 0.0  # committed tokens that one more token in a step costs
    typical_step_seconds: float = 0.0  # moving average of decode steps
    preemptions: int = 0  # since the worker's start
    draining: bool = False  # about to leave
    draft_starvation: float = 0.0  # share of sessions with k > 0 that had no draft in a step, moving average
    unread_prompt_tokens: int = 0  # of its sessions, those that wait included
    prompt_token_seconds: float = 0.0  # that reading one more prompt token takes, moving average
    goodput: float = 0.0  # tokens committed a second, all sessions together, moving average of decode steps
    drafts_rest: bool = False  # in that step
    draft_gain: float = 0.0  # goodput with drafts over that without, as last compared; 0 = not compared yet
    draft_trials: int = 0  # comparisons since the worker's start
    draft_cost: float = 0.0  # committed tokens that a draft token costs, in the mean over those of a step

    @property
    def sessions(self) -> int:
        """Returns how many are open there."""
        return self.running + self.waiting

    def is_news(self, told: VerifierLoad) -> bool:
        """Returns whether a router that was told the other one might place a session elsewhere by it."""
        return (
            (self.running, self.waiting, self.draining) != (told.running, told.waiting, told.draining)
            or abs(self.kv_usage - told.kv_usage) > WORTH_TELLING
            or abs(self.price - told.price) > WORTH_TELLING
        )


@dataclass(frozen=True, slots=True)
class DrafterLoad:
    """How busy a drafter is, and how often its guesses were wrong."""

    sessions: int = 0  # open there
    token_seconds: float = 0.0  # moving average of the time to add one guess to every session that wants one
    busy: float = 0.0  # share of the time since the last report that went into guesses, 0..1
    kv_usage: float = 0.0  # share of KV blocks held, 0..1
    round_trip_seconds: float = 0.0  # to the nearest of its verifiers and back
    # Seconds, by verifier address; in a report, those that were not told before or have changed since.
    round_trips: Mapping[str, float] = field(default_factory=dict)
    rejections: int = 0  # drafted tokens in whose place the target took another, since the drafter's start
    rejections_covered: int = 0  # of them, those where a branch had the token that it took

    def is_news(self, told: DrafterLoad) -> bool:
        """Returns whether a router that was told the other one might choose another drafter by this one."""
        slower = abs(self.token_seconds - told.token_seconds) > WORTH_TELLING * told.token_seconds
        return self.sessions != told.sessions or slower or bool(self.round_trips)


Load = VerifierLoad | DrafterLoad
