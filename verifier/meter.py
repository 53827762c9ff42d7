"""What the steps showed: moving averages over steps in which nobody's prompt was read in."""

from __future__ import annotations

from dataclasses import dataclass

from verifier.price import StepTime

SMOOTHING = 0.1


@dataclass(slots=True)
class Meter:
    """Fed with every such step. The zeros stand for "not measured yet"."""

    step_time: StepTime | None = None  # None = no profile was made: no price
    step_seconds: float = 0.0
    step_tokens: float = 0.0
    committed: float = 0.0  # tokens a step, all sessions together
    starvation: float = 0.0  # share of sessions with k > 0 that had no draft

    def observe(self, seconds: float, tokens: int, committed: int, starved: float | None) -> None:
        """A step of `tokens` tokens; `starved`: None where no session wanted drafts."""
        weight = SMOOTHING if self.step_seconds else 1.0
        self.step_seconds += weight * (seconds - self.step_seconds)
        self.step_tokens += weight * (tokens - self.step_tokens)
        self.committed += weight * (committed - self.committed)
        if starved is not None:
            self.starvation += SMOOTHING * (starved - self.starvation)
        if self.step_time is not None:
            self.step_time.observe(tokens, seconds)

    @property
    def goodput(self) -> float:
        """Tokens committed a second while the engine is not waiting."""
        return self.committed / self.step_seconds if self.step_seconds else 0.0

    @property
    def price(self) -> float:
        """Committed tokens that one more token in a step costs."""
        return self.step_time.price(self.goodput, self.step_tokens) if self.step_time is not None else 0.0
