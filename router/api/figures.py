"""The figures that whole answers end with, as JSON names and types."""

from __future__ import annotations

from typing import Annotated, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

Count = Annotated[int, Field(ge=0)]


class CachedTokens(TypedDict):
    cached_tokens: Count


class ReasoningTokens(TypedDict):
    reasoning_tokens: Count


class OutputTokens(TypedDict, total=False):
    """How many tokens a model reasoned with; and how many of a prediction were verified, taken or not."""

    reasoning_tokens: Count
    accepted_prediction_tokens: Count
    rejected_prediction_tokens: Count


class Usage(TypedDict):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: NotRequired[CachedTokens]
    completion_tokens_details: NotRequired[OutputTokens]


class SourceGuesses(TypedDict):
    """How many draft tokens one source had guessed. What two guessed counts for both."""

    num_draft_tokens: Count
    num_accepted_draft_tokens: Count


class Speculation(TypedDict):
    """The figures of speculation, as vLLM tells them."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[Count]
    num_spec_steps: Count
    num_accepted_draft_tokens: Count
    num_draft_tokens: Count
    own_guesses: NotRequired[dict[str, SourceGuesses]]
    drafters: NotRequired[dict[str, SourceGuesses]]


class GenerationMetrics(TypedDict):
    speculative_decoding: Speculation
    numerics_changes: Annotated[
        int,
        Field(
            ge=0,
            description="Times that a text went on at a verifier whose logits are rounded otherwise: "
            "of tokens that are nearly equal another one may have been chosen.",
        ),
    ]


class Totals(TypedDict):
    """What every whole answer ends with."""

    usage: Usage
    metrics: GenerationMetrics
