"""How a conversation becomes a prompt, beside its turns: plain data, as a request has it."""

from __future__ import annotations

from collections.abc import Mapping
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
