"""What all models of request fields share: a null is an absent field, an unknown one is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
        "access_programs",
        "allowed_token_ids",
        "annotations",
        "audio",
        "background",
        "background_options",
        "chat_template",
        "chat_template_kwargs",
        "container",
        "context_management",
        "conversation",
        "diagnostics",
        "early_stopping",
        "ec_transfer_params",
        "echo",
        "enable_response_messages",
        "frequency_penalty",
        "function_call",
        "functions",
        "guided_choice",
        "guided_decoding_backend",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "guided_whitespace_pattern",
        "ignore_eos",
        "image",
        "include_reasoning",
        "include_stop_str_in_output",
        "inference_geo",
        "kv_transfer_params",
        "logit_bias",
        "logits_processors",
        "logprob_token_ids",
        "max_tool_calls",
        "mcp_servers",
        "media_io_kwargs",
        "metadata",
        "mm_processor_kwargs",
        "modalities",
        "moderation",
        "name",
        "output_config",
        "output_format",
        "parallel_tool_calls",
        "prediction",
        "presence_penalty",
        "previous_input_messages",
        "previous_response_id",
        "prompt",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "prompt_embeds",
        "reasoning",
        "reasoning_effort",
        "refusal",
        "repetition_detection",
        "repetition_penalty",
        "request_id",
        "return_token_offsets",
        "safety_identifier",
        "service_tier",
        "session_id",
        "skip_special_tokens",
        "stop",
        "store",
        "structural_tag",
        "structured_outputs",
        "suffix",
        "thinking",
        "thinking_token_budget",
        "tool_call_id",
        "tool_calls",
        "tool_choice",
        "tools",
        "top_logprobs",
        "truncate_prompt_tokens",
        "truncation_side",
        "user",
        "verbosity",
        "vllm_xargs",
        "watermarking",
        "web_search_options",
    }
)

# They mean nothing without another field: of several that are refused, that one is named.
SIDE = frozenset({"function_call", "parallel_tool_calls", "tool_choice"})


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
    names: ClassVar[Mapping[str, str]] = {}
    """Part of a chat's field -> how it is called here."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        others = [name for name in fields if name not in cls.model_fields]
        for name in sorted(others, key=SIDE.__contains__):
            value = fields[name]
            if value is None and (name in UNSUPPORTED or name in cls.neutral):
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
