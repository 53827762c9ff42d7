"""How many guesses were verified and accepted, by who made them: draft models, or verifiers themselves."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter

from outrider.wire.guesses import OwnCounts

MOST_SOURCES = 64  # draft models that are told apart: their names are what workers say
OTHERS = "others"


class GuessMetrics:
    """The metrics of guesses of one router. A token that two have guessed counts for both."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tokens = Counter(
            "outrider_draft_tokens",
            "Draft tokens verified, by who had guessed them (a draft model, suffix, prediction, grammar, "
            "speculator) and by what became of them.",
            ["model_name", "source", "fate"],
            registry=registry,
        )
        # By the target's model and the source: the metric's two children, and what is told of a source.
        self._children: dict[tuple[str, str], tuple[Any, Any]] = {}
        self._told: dict[str, list[int]] = {}

    def count(self, model: str, source: str, verified: int, accepted: int) -> None:
        if source not in self._told and len(self._told) >= MOST_SOURCES:
            source = OTHERS
        of = self._children.get((model, source))
        if of is None:
            of = tuple(self._tokens.labels(model, source, fate) for fate in ("accepted", "rejected"))  # type: ignore[assignment]
            assert of is not None
            self._children[model, source] = of
        right, wrong = of
        right.inc(accepted)
        wrong.inc(verified - accepted)
        told = self._told.setdefault(source, [0, 0])
        told[0] += verified
        told[1] += accepted

    def count_own(self, model: str, own: OwnCounts) -> None:
        for source, verified, accepted in own.by_source:
            if verified:
                self.count(model, source, verified, accepted)

    @property
    def by_source(self) -> list[tuple[str, int, int]]:
        """Returns (source, verified, accepted), over all models."""
        return [(source, verified, accepted) for source, (verified, accepted) in sorted(self._told.items())]
