"""How a conversation becomes a prompt, beside its turns: plain data, as a request has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "strftime_now"})
"""Names that a template finds its own values under."""


@dataclass(frozen=True, slots=True)
class Rendering:
    add_generation_prompt: bool = True  # the prompt ends where an answer of the assistant begins
    continue_final_message: bool = False  # it ends amid the last turn, which the output goes on with
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template, by name


USUAL = Rendering()


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template is given."""

    turns: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()  # as transformers gives them
    rendering: Rendering = USUAL

    def to_json(self) -> dict[str, Any]:
        """Returns it as a JSON object. `asdict` would go into what clients nest, and run out of stack."""
        return {
            "turns": [dict(turn) for turn in self.turns],
            "tools": list(self.tools),
            "rendering": {name: getattr(self.rendering, name) for name in Rendering.__slots__},
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Conversation:
        return cls(told["turns"], told["tools"], Rendering(**told["rendering"]))
