"""Sampling parameters: plain data, validated once, the same for router, verifier and drafter. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from outrider.errors import InvalidRequest
from outrider.options.sessions import MAX_SEED
from outrider.sampling.logit_bias import LogitBias
from outrider.sampling.range import Range

BIASES = Range(-100, 100)
BARRED = -3.4e38  # a bias with which a token is not drawn while there is any other
MAX_BIASES = 1024  # a few for each token of what a request may want to hear or not; OpenAI takes 300


def _within(allowed: Range, default: float) -> Any:
    return field(default=default, metadata={"range": allowed})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's token is drawn. The defaults draw from the model's own distribution.

    Transforms apply in this order: repetition, frequency and presence penalty, logit bias, temperature,
    top_k, top_p, min_p. Repetition counts tokens of prompt and output; frequency and presence count the
    output alone (drafted tokens before the position included). These are vLLM's conventions.
    """

    temperature: float = _within(Range(0, 100), 1.0)
    top_k: int = _within(Range(0, 2**31 - 1, words="0 or -1 (off) or an integer up to 2^31 - 1"), 0)
    top_p: float = _within(Range(0, 1, above=True), 1.0)
    min_p: float = _within(Range(0, 1), 0.0)
    presence_penalty: float = _within(Range(-2, 2), 0.0)
    frequency_penalty: float = _within(Range(-2, 2), 0.0)
    repetition_penalty: float = _within(Range(0.01, 100), 1.0)
    logit_bias: Mapping[int, float] = field(default_factory=LogitBias)
    seed: int = _within(Range(0, MAX_SEED, words="an integer from {low} to {high}"), 0)

    def __post_init__(self) -> None:
        if not isinstance(self.logit_bias, LogitBias):
            object.__setattr__(self, "logit_bias", LogitBias(self.logit_bias))

    @property
    def biases(self) -> LogitBias:
        """Returns logit_bias as draws take it."""
        assert isinstance(self.logit_bias, LogitBias)
        return self.logit_bias

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """Returns True if earlier tokens change the logits in other ways than through the model."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def cut(self) -> bool:
        """Returns True if all of a row's logits together decide which tokens are ruled out."""
        return bool(self.top_k) or self.top_p < 1.0 or self.min_p > 0.0

    def barring(self, ids: Iterable[int]) -> SamplingParams:
        """Returns the same, but that these ids are not drawn while there is any other."""
        return replace(self, logit_bias=LogitBias({**self.logit_bias, **dict.fromkeys(ids, BARRED)}))

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidRequest naming the first field out of range and its limits."""
        for name, allowed in RANGES.items():
            allowed.check(name, getattr(self, name))
        if len(self.logit_bias) > MAX_BIASES:
            raise InvalidRequest(
                f"logit_bias must have at most {MAX_BIASES} token ids, not {len(self.logit_bias)}",
                field="logit_bias",
            )
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"logit_bias names token id {token}; ids go from 0 to {vocab_size - 1}",
                    field="logit_bias",
                )
            BIASES.check("logit_bias", bias)


RANGES: Mapping[str, Range] = {
    each.name: each.metadata["range"] for each in fields(SamplingParams) if "range" in each.metadata
}
