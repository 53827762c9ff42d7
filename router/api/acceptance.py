"""How speculation went for a request: vLLM's `metrics.speculative_decoding` object."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.wire.guesses import NO_OWN, DrafterCounts, OwnCounts
from router.api.figures import Speculation


@dataclass(slots=True)
class SpeculationStats:
    """Counts over the target steps that verified at least one draft token.

    sum(histogram) = steps and sum(i * histogram[i]) = accepted, always. Ratios as vLLM defines them
    (docs.vllm.ai, features/speculative_decoding/acceptance_metrics). They are numbers always, since tools
    that read them expect that: a request without drafts has length 1 and rate 0.
    """

    steps: int = 0
    accepted: int = 0  # draft tokens
    drafted: int = 0  # draft tokens verified
    histogram: list[int] = field(
        default_factory=list
    )  # [i] = steps that accepted i; as long as the longest draft + 1
    own: OwnCounts = NO_OWN  # of them, those that the verifier itself had guessed
    drafters: dict[str, tuple[int, int]] = field(default_factory=dict)
    """How many of them each draft model guessed, and how many of these were right, if several drafted."""

    def add(
        self,
        accepted: int,
        verified: int,
        beside: int = 0,
        own: OwnCounts = NO_OWN,
        drafters: Iterable[DrafterCounts] = (),
    ) -> None:
        """Counts one target step; one without drafts is no speculative step. `verified`: the accepted ones
        and the path behind them; `beside`: those of other branches."""
        if verified == 0:
            return
        if any(own):
            self.own = self.own.plus(own)
        for one in drafters:
            self._add_of(one.name, one.verified, one.accepted)
        self.steps += 1
        self.accepted += accepted
        self.drafted += verified + beside
        self._widen(verified + 1)
        self.histogram[accepted] += 1

    def merge(self, other: SpeculationStats) -> None:
        """Adds another request's steps."""
        self.steps += other.steps
        self.accepted += other.accepted
        self.drafted += other.drafted
        self.own = self.own.plus(other.own)
        for name, (drafted, accepted) in other.drafters.items():
            self._add_of(name, drafted, accepted)
        self._widen(len(other.histogram))
        for accepted, steps in enumerate(other.histogram):
            self.histogram[accepted] += steps

    def _add_of(self, name: str, drafted: int, accepted: int) -> None:
        before = self.drafters.get(name, (0, 0))
        self.drafters[name] = before[0] + drafted, before[1] + accepted

    def _widen(self, length: int) -> None:
        self.histogram.extend([0] * (length - len(self.histogram)))

    @property
    def mean_acceptance_length(self) -> float:
        """Returns the tokens a step, the target's own included."""
        return 1 + self.accepted / self.steps if self.steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    def as_json(self) -> Speculation:
        told: Speculation = {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_histogram": self.histogram,
            "num_spec_steps": self.steps,
            "num_accepted_draft_tokens": self.accepted,
            "num_draft_tokens": self.drafted,
        }
        if any(self.own):
            told["own_guesses"] = {
                source: {"num_draft_tokens": drafted, "num_accepted_draft_tokens": accepted}
                for source, drafted, accepted in self.own.by_source
            }
        if self.drafters:
            told["drafters"] = {
                name: {"num_draft_tokens": drafted, "num_accepted_draft_tokens": accepted}
                for name, (drafted, accepted) in self.drafters.items()
            }
        return told
