"""Fields that clients send by habit. They are taken where their value asks for nothing that is not served
here, and change nothing; any other value is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 1024  # of a text
MAX_ENTRIES = 16  # of an object


@dataclass(frozen=True, slots=True)
class Only:
    """These JSON values alone."""

    values: tuple[object, ...]

    def fault(self, value: object) -> str | None:
        """Returns what is wrong with a value, to follow the field's name; None if nothing is."""
        if any(_equal(value, one) for one in self.values):
            return None
        told = " or ".join(json.dumps(one) for one in self.values)
        return f"is not supported by this server, but for {told}"

    @property
    def schema(self) -> dict[str, Any]:
        return {"enum": [*self.values, None]}


@dataclass(frozen=True, slots=True)
class Every:
    """Every value of a JSON type, up to MAX_BYTES or MAX_ENTRIES."""

    kind: type
    name: str  # of the JSON type

    def fault(self, value: object) -> str | None:
        if type(value) is not self.kind:
            return f"must be of type {self.name}"
        if isinstance(value, str) and len(value.encode(errors="replace")) > MAX_BYTES:
            return f"must be at most {MAX_BYTES} bytes"
        if isinstance(value, dict) and len(value) > MAX_ENTRIES:
            return f"must have at most {MAX_ENTRIES} entries"
        return None

    @property
    def schema(self) -> dict[str, Any]:
        limit: dict[str, int] = {}
        if self.kind is str:
            limit = {"maxLength": MAX_BYTES}
        elif self.kind is dict:
            limit = {"maxProperties": MAX_ENTRIES}
        return {"anyOf": [{"type": self.name, **limit}, {"type": "null"}]}


Neutral = Mapping[str, Only | Every]


def _equal(value: object, neutral: object) -> bool:
    """Returns True for the same JSON value: true is no 1."""
    return isinstance(value, bool) is isinstance(neutral, bool) and value == neutral


def _only(*values: object) -> Only:
    return Only(values)


TEXT, FLAG, OBJECT = Every(str, "string"), Every(bool, "boolean"), Every(dict, "object")

BOTH: Neutral = {  # OpenAI's, then vLLM's
    "store": _only(False),
    "service_tier": _only("auto", "default"),
    "user": TEXT,
    "metadata": OBJECT,
    "safety_identifier": TEXT,
    "prompt_cache_key": TEXT,
    "prompt_cache_retention": TEXT,
    "prompt_cache_options": OBJECT,
    "bad_words": _only([]),
    "length_penalty": _only(1),
    "use_beam_search": _only(False),
    "spaces_between_special_tokens": _only(True),
    "return_tokens_as_token_ids": _only(False),
    "return_token_ids": _only(False),
    "return_token_offsets": _only(False),
    "thinking_token_budget": _only(-1),
    "vllm_xargs": _only({}),
}
COMPLETION: Neutral = {
    **BOTH,
    "top_logprobs": _only(0),
    "add_special_tokens": _only(True),
}
CHAT: Neutral = {
    **BOTH,
    "echo": _only(False),
    "functions": _only([]),
    "function_call": _only("none", "auto"),
    "modalities": _only(["text"]),
    "verbosity": _only("medium"),
    "add_special_tokens": _only(False),
    "documents": _only([]),
    "include_reasoning": _only(True),
    "mm_processor_kwargs": _only({}),
    "media_io_kwargs": _only({}),
}
STREAM_OPTIONS: Neutral = {"include_obfuscation": _only(False)}
MESSAGE: Neutral = {"name": TEXT, "annotations": _only([])}  # also sent back
MESSAGES: Neutral = {  # Anthropic's
    "metadata": OBJECT,
    "cache_control": OBJECT,
    "context_management": _only({}, {"edits": []}),
    "service_tier": _only("auto", "standard_only"),
    "mcp_servers": _only([]),
    "speed": _only("standard"),
    "user_profile_id": TEXT,
    "workspace_id": TEXT,
}
RESPONSES: Neutral = {
    "store": _only(False),
    "background": _only(False),
    "truncation": _only("disabled"),
    "stream_options": _only({}, {"include_obfuscation": False}),
    "service_tier": _only("auto", "default"),
    "user": TEXT,
    "safety_identifier": TEXT,
    "prompt_cache_key": TEXT,
    "prompt_cache_retention": TEXT,
    "prompt_cache_options": OBJECT,
    "max_tool_calls": Every(int, "integer"),  # of OpenAI's own tools
    "context_management": _only([]),
    "include_reasoning": _only(True),
}
