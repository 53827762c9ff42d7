"""Sampling parameters: plain data, validated once, the same for router, verifier and drafter. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.errors import InvalidRequest
from outrider.options.sessions import MAX_SEED


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's token is drawn. The defaults draw from the model's own distribution.

    Transforms apply in this order: repetition, frequency and presence penalty, logit bias, temperature,
    top_k, top_p, min_p. Repetition counts tokens of prompt and output; frequency and presence count the
    output alone (drafted tokens before the position included). These are vLLM's conventions.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """Whether the logits depend on which tokens came before, apart from the model itself."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidRequest naming the first field out of range and its limits."""
        _within("temperature", self.temperature, 0.0, 100.0)
        if not (isinstance(self.top_k, int) and 0 <= self.top_k < 2**31):
            raise InvalidRequest(
                f"top_k must be 0 or -1 (off) or a positive integer, not {self.top_k}", field="top_k"
            )
        _within("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        if not 0 <= self.seed <= MAX_SEED:
            raise InvalidRequest(
                f"seed must be an integer from 0 to {MAX_SEED}, not {self.seed}", field="seed"
            )
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"logit_bias names token id {token}; ids go from 0 to {vocab_size - 1}",
                    field="logit_bias",
                )
            _within("logit_bias", bias, -100.0, 100.0)


def _within(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    inside = math.isfinite(value) and value <= high and (value > low if open_low else value >= low)
    if not inside:
        bracket = "(" if open_low else "["
        raise InvalidRequest(f"{name} must be in {bracket}{low:g}, {high:g}], not {value}", field=name)
