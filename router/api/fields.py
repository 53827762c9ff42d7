"""What all models of request fields share: a null is an absent field, an unknown one is refused by name."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from router.api.body import MAX_BODY_BYTES
from router.api.neutral import Neutral

SHOWN = 100  # characters of what a client sent, in a message that refuses it

# Fields of OpenAI's API and vLLM's that have no meaning here (yet): refused as such, not as typing mistakes.
# Some values of some of them ask for nothing: neutral.py.
UNSUPPORTED = frozenset(
    {
        "allowed_token_ids",
        "annotations",
        "audio",
        "background",
        "container",
        "context_management",
        "conversation",
        "echo",
        "function_call",
        "functions",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "logits_processors",
        "max_tool_calls",
        "mcp_servers",
        "metadata",
        "modalities",
        "moderation",
        "name",
        "output_config",
        "output_format",
        "parallel_tool_calls",
        "prediction",
        "previous_response_id",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning",
        "reasoning_effort",
        "refusal",
        "safety_identifier",
        "service_tier",
        "store",
        "suffix",
        "thinking",
        "tool_call_id",
        "tool_calls",
        "tool_choice",
        "tools",
        "top_logprobs",
        "truncate_prompt_tokens",
        "user",
        "verbosity",
        "web_search_options",
    }
)


def refused(what: str) -> PydanticCustomError:
    """`what` follows the field's name: "must be ..."."""
    return PydanticCustomError("refused", "{what}", {"what": what})


def at_fault(name: str, fault: str | None) -> PydanticCustomError:
    """`fault` follows the field's name; None: there is no such field."""
    told = name if len(name) <= SHOWN else f"{name[:SHOWN]}..."
    told = told.encode(errors="backslashreplace").decode()  # JSON may hold half of a surrogate pair
    return PydanticCustomError("at_fault", "{name}", {"name": told, "fault": fault})


def json_type(value: object) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array"}
    return "null" if value is None else names.get(type(value), "an object")


def shown(value: object) -> str:
    """Returns a value as a message quotes it: never much of it."""
    if not isinstance(value, str):
        return json_type(value)
    return repr(value if len(value) <= SHOWN else f"{value[:SHOWN]}...")


def checked_text(value: object, most_bytes: int = MAX_BODY_BYTES) -> str:
    if not isinstance(value, str):
        raise refused(f"must be a string, not {json_type(value)}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise refused(f"must be valid Unicode; character {error.start} is half of a surrogate pair") from None
    if size > most_bytes:
        raise refused(f"must be at most {most_bytes} bytes, not {size}")
    return value


def sized(value: Any, most_bytes: int) -> Any:
    """Returns a JSON value that a client makes up as it likes: a schema, variables, what a call said. It goes
    on to templates, grammars and answers, so what not all of them can take is refused."""
    try:
        text = json.dumps(value, allow_nan=False)
        if "\\ud" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise refused("is nested too deep") from None
    except UnicodeEncodeError:
        raise refused("must be valid Unicode throughout; it has half of a surrogate pair") from None
    except ValueError:
        raise refused("must have finite numbers only") from None
    if len(text) > most_bytes:
        raise refused(f"may have {most_bytes} bytes as JSON, not {len(text)}")
    return value


def _told_besides(document: dict[str, Any], kind: type[Fields]) -> None:
    """Lets the document say that a null is an absent field, and which fields are taken and change nothing."""
    null = {"type": "null"}
    for name, field in kind.model_fields.items():
        told = document["properties"][name]
        if not (field.is_required() or null in told.get("anyOf", ())):
            document["properties"][name] = {"anyOf": [told, null]}
    for name, one in kind.neutral.items():
        document["properties"][name] = {**one.schema, "description": "Taken, and changes nothing."}


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, json_schema_extra=_told_besides)

    neutral: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        for name, value in fields.items():
            if name in cls.model_fields or (value is None and (name in UNSUPPORTED or name in cls.neutral)):
                continue
            if name in cls.neutral:
                fault = cls.neutral[name].fault(value)
            elif name in UNSUPPORTED:
                fault = "is not supported by this server"
            else:
                raise at_fault(name, None)
            if fault is not None:
                raise at_fault(name, fault)
        return {
            name: value for name, value in fields.items() if value is not None and name in cls.model_fields
        }
