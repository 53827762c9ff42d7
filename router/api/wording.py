"""What of a session's tokens becomes text: plain data, kept with the session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.reasoning import ReasoningReading


@dataclass(frozen=True, slots=True)
class Wording:
    include_stop: bool = False  # the text has the stop string or the stop token that ended it
    special_tokens: bool = False  # they are text
    echo: tuple[str, ...] = ()  # what comes before the output, for each prompt
    drop_output: bool = False  # that is all the text: one token is drawn, and not told
    prompt_logprobs: bool = False  # they are told of the prompt by itself
    best: int = 0  # of the answers to each prompt that many are told, the likeliest; 0 = all
    hide_logprobs: bool = False  # they only say which
    reasoning: ReasoningReading | None = None  # None = all of it is the answer

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Wording:
        """Raises TypeError or KeyError if they are none."""
        reasoning = ReasoningReading(**fields["reasoning"]) if fields.get("reasoning") else None
        return cls(**{**fields, "echo": tuple(fields["echo"]), "reasoning": reasoning})
