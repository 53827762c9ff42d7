"""The fields of a request, as JSON names, types and ranges: what may be written down at all.

Types are strict: no number from a string, no integer from a boolean. A null is an absent field.
Ranges are told here and checked in `validation`, with the limits that depend on the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from outrider.errors import InvalidRequest
from outrider.sampling.params import BIASES, MAX_BIASES, RANGES, SamplingParams
from outrider.sampling.range import Range
from router.api.body import MAX_BODY_BYTES, MAX_VALUES

# Every text and every list has a most: what follows takes time and memory that grow with them.
MAX_STOPS = 16
MAX_STOP_BYTES = 1024
MAX_PROMPTS = 128
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # of one message
MAX_MODEL_BYTES = 256
SHOWN = 100  # characters of what a client sent, in a message that refuses it
SPECULATIVE_TOKENS = Range(0, 1024, words="from {low} (off) to {high}, or absent (adaptive)")
MAX_ID = 2**31 - 1
LEAST_TOKENS = 1  # of output
MAX_SALT_BYTES = 1024

# Fields of OpenAI's API that have no meaning here (yet): refused as such, not as typing mistakes.
UNSUPPORTED = frozenset(
    {
        "annotations",
        "audio",
        "best_of",
        "echo",
        "function_call",
        "functions",
        "logprobs",
        "metadata",
        "modalities",
        "moderation",
        "name",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning_effort",
        "refusal",
        "response_format",
        "safety_identifier",
        "service_tier",
        "store",
        "suffix",
        "tool_call_id",
        "tool_calls",
        "tool_choice",
        "tools",
        "top_logprobs",
        "user",
        "verbosity",
        "web_search_options",
    }
)


def _refused(what: str) -> PydanticCustomError:
    """`what` follows the field's name: "must be ..."."""
    return PydanticCustomError("refused", "{what}", {"what": what})


def _unknown(name: str) -> PydanticCustomError:
    kind = "unsupported" if name in UNSUPPORTED else "unknown"
    shown = name if len(name) <= SHOWN else f"{name[:SHOWN]}..."
    shown = shown.encode(errors="backslashreplace").decode()  # JSON may hold half of a surrogate pair
    return PydanticCustomError(kind, "{name}", {"name": shown})


def _json_type(value: object) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array"}
    return "null" if value is None else names.get(type(value), "an object")


def _shown(value: object) -> str:
    """Returns a value as a message quotes it: never much of it."""
    if not isinstance(value, str):
        return _json_type(value)
    return repr(value if len(value) <= SHOWN else f"{value[:SHOWN]}...")


def _text(value: object, most_bytes: int = MAX_BODY_BYTES) -> str:
    if not isinstance(value, str):
        raise _refused(f"must be a string, not {_json_type(value)}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise _refused(
            f"must be valid Unicode; character {error.start} is half of a surrogate pair"
        ) from None
    if size > most_bytes:
        raise _refused(f"must be at most {most_bytes} bytes, not {size}")
    return value


def _model(value: object) -> str:
    return _text(value, MAX_MODEL_BYTES)


def _token_ids(value: list[Any]) -> tuple[int, ...]:
    for index, item in enumerate(value):
        if type(item) is not int:
            raise _refused(f"must be token ids (integers) throughout; item {index} is {_json_type(item)}")
    return tuple(value)


def _prompts(value: object) -> list[str | tuple[int, ...]]:
    if isinstance(value, str):
        return [_text(value)]
    if not isinstance(value, list):
        raise _refused(
            "must be a string, an array of strings, an array of token ids or an array of those, "
            f"not {_json_type(value)}"
        )
    if not value:
        raise _refused("must not be empty")
    if not isinstance(value[0], str | list):
        return [_token_ids(value)]
    if len(value) > MAX_PROMPTS:
        raise _refused(f"must be at most {MAX_PROMPTS} prompts, not {len(value)}")
    for index, item in enumerate(value):
        if type(item) is not type(value[0]):
            kind = _json_type(value[0])
            raise _refused(f"must not mix kinds: item 0 is {kind} and item {index} is {_json_type(item)}")
    return [_text(item) if isinstance(item, str) else _token_ids(item) for item in value]


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise _refused(f"must be a string or an array of strings, not {_json_type(value)}")
    if len(stops) > MAX_STOPS:
        raise _refused(f"must be at most {MAX_STOPS} strings, not {len(stops)}")
    if "" in stops:
        raise _refused("must not hold an empty string")
    return tuple(_text(stop, MAX_STOP_BYTES) for stop in stops)


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise _refused(f"must be an object from token ids to numbers, not {_json_type(value)}")
    if len(value) > MAX_BIASES:
        raise _refused(f"must have at most {MAX_BIASES} token ids, not {len(value)}")
    biases = {}
    for key, bias in value.items():
        if not (
            type(key) is int or (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20)
        ):
            raise _refused(f"must have token ids as keys, not {_shown(key)}")
        if type(bias) not in (int, float):
            raise _refused(f"must have numbers as values; that of token id {key} is {_json_type(bias)}")
        try:
            biases[int(key)] = float(bias)
        except OverflowError:
            raise _refused(f"must be {BIASES}; that of token id {key} is too large a number") from None
    return biases


def _content(value: object) -> str:
    if not isinstance(value, list):
        return _text(value)
    if len(value) > MAX_PARTS:
        raise _refused(f"must be at most {MAX_PARTS} parts, not {len(value)}")
    return "".join(_part(index, part) for index, part in enumerate(value))


def _part(index: int, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind != "text":
        found = f"of type {_shown(kind)}" if isinstance(part, dict) else _json_type(part)
        raise _refused(f'must be a string or parts of type "text"; part {index} is {found}')
    if part.keys() != {"type", "text"}:
        raise _refused(f'must have parts of the fields "type" and "text" only; part {index} has not')
    return _text(part["text"])


def _role(value: object) -> str:
    if value not in get_args(Role):
        raise _refused(f"must be one of {', '.join(get_args(Role))}, not {_shown(value)}")
    return str(value)


def _salt(value: object) -> str:
    salt = _text(value, MAX_SALT_BYTES)
    if not salt:
        raise _refused("must not be empty: leave it out, or send what others cannot guess")
    return salt


def _only_one(value: object) -> object:
    if type(value) is int and value != 1:
        raise _refused(f"must be 1, not {value}: send the request again for another answer")
    return value


class TextPart(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: Annotated[str, Field(max_length=MAX_BODY_BYTES)]


# What the fields with checks of their own may hold, as the API's document tells it.
Role = Literal["system", "user", "assistant"]
Content = Annotated[str, Field(max_length=MAX_BODY_BYTES)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_BODY_BYTES)]
ModelName = Annotated[str, Field(max_length=MAX_MODEL_BYTES)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_BYTES)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=MAX_ID)]], Field(min_length=1, max_length=MAX_VALUES)]
Several = Field(min_length=1, max_length=MAX_PROMPTS)
Prompt = Text | TokenIds | Annotated[list[Text], Several] | Annotated[list[TokenIds], Several]
Stop = StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)]
Contents = Content | Annotated[list[TextPart], Field(max_length=MAX_PARTS)]
Salt = Annotated[str, Field(min_length=1, max_length=MAX_SALT_BYTES)]
BIASES_SCHEMA: dict[str, Any] = {
    "type": "object",
    "maxProperties": MAX_BIASES,
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": {"type": "number", **BIASES.json_schema()},
}


def _ranged(default: object, allowed: Mapping[str, float], description: str | None = None) -> Any:
    """Returns a field whose range the document tells, and `validation` checks."""
    return Field(default, description=description, json_schema_extra=dict(allowed))


def _sampling(name: str, description: str | None = None, **other: float) -> Any:
    """Returns the field of a sampling parameter: its default and its range are SamplingParams' own."""
    return _ranged(getattr(SamplingParams(), name), {**RANGES[name].json_schema(), **other}, description)


def _nulls(document: dict[str, Any], kind: type[BaseModel]) -> None:
    """Lets the document say that a null is an absent field."""
    null = {"type": "null"}
    for name, field in kind.model_fields.items():
        told = document["properties"][name]
        if not (field.is_required() or null in told.get("anyOf", ())):
            document["properties"][name] = {"anyOf": [told, null]}


Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, json_schema_extra=_nulls)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        for name, value in fields.items():
            if name not in cls.model_fields and (value is not None or name not in UNSUPPORTED):
                raise _unknown(name)
        return {name: value for name, value in fields.items() if value is not None}


class StreamOptions(_Fields):
    """What a stream carries besides the text."""

    include_usage: bool = Field(default=False, description="A last chunk with usage and statistics.")
    continuous_usage_stats: bool = Field(default=False, description="Usage so far on every chunk.")


class ChatMessage(_Fields):
    """One turn of a conversation."""

    role: Annotated[str, PlainValidator(_role, json_schema_input_type=Role)]
    content: Annotated[str, PlainValidator(_content, json_schema_input_type=Contents)]


class GenerationFields(_Fields):
    """The fields that both endpoints have."""

    model: Annotated[str, PlainValidator(_model, json_schema_input_type=ModelName)] = Field(
        default="", description="Empty = the one that is served."
    )
    max_tokens: int | None = _ranged(
        None,
        {"minimum": LEAST_TOKENS},
        "Most output tokens; absent = 16, for chat the rest of the context.",
    )
    max_completion_tokens: int | None = _ranged(
        None, {"minimum": LEAST_TOKENS}, "OpenAI's newer name of max_tokens."
    )
    temperature: Finite = _sampling("temperature", "0 = greedy.")
    top_p: Finite = _sampling("top_p")
    top_k: int = _sampling("top_k", "0 or -1 = off.", minimum=-1)
    min_p: Finite = _sampling("min_p")
    seed: int | None = _ranged(
        None, RANGES["seed"].json_schema(), "Replays an answer; absent = drawn, and returned."
    )
    stop: Annotated[tuple[str, ...], PlainValidator(_stops, json_schema_input_type=Stop)] = Field(
        default=(), description="The text ends before the first of them."
    )
    n: Annotated[int, BeforeValidator(_only_one, json_schema_input_type=Literal[1])] = 1
    presence_penalty: Finite = _sampling("presence_penalty")
    frequency_penalty: Finite = _sampling("frequency_penalty")
    repetition_penalty: Finite = _sampling("repetition_penalty")
    logit_bias: Annotated[dict[int, float], PlainValidator(_logit_bias), WithJsonSchema(BIASES_SCHEMA)] = (
        Field(default_factory=dict, description="By token id: added to its logit.")
    )
    ignore_eos: bool = Field(default=False, description="Go on past the end of the text.")
    stream: bool = Field(default=False, description="Send the text as it comes.")
    stream_options: StreamOptions = StreamOptions()
    num_speculative_tokens: int | None = _ranged(
        None,
        SPECULATIVE_TOKENS.json_schema(),
        "Most draft tokens a step; absent = adaptive, 0 = off.",
    )
    cache_salt: Annotated[str | None, PlainValidator(_salt, json_schema_input_type=Salt)] = Field(
        default=None, description="Cached prefixes are shared with requests of the same salt only."
    )


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: Annotated[
        list[str | tuple[int, ...]], PlainValidator(_prompts, json_schema_input_type=Prompt)
    ] = Field(description="Text or token ids, or several of either: then there is a choice for each.")


class ChatRequest(GenerationFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


Request = TypeVar("Request", bound=GenerationFields)


def parse(kind: type[Request], body: object) -> Request:
    """The request that a decoded JSON body is. Raises InvalidRequest naming the first field at fault."""
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {_json_type(body)}")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _explained(error.errors(include_url=False)[0]) from None


_EXPECTED: Mapping[str, str] = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "string_unicode": "valid Unicode",
    "list_type": "an array",
    "model_type": "an object",
}


def _explained(error: ErrorDetails) -> InvalidRequest:
    field = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error["loc"])[1:]
    kind, value = error["type"], error["input"]
    if kind in ("unsupported", "unknown"):
        name = f"{field}.{error['ctx']['name']}" if field else error["ctx"]["name"]
        message = f"unknown field {name}" if kind == "unknown" else f"{name} is not supported by this server"
        return InvalidRequest(message, field=name)
    if kind == "refused":
        message = f"{field} {error['msg']}"
    elif kind == "missing":
        message = f"{field} is required"
    elif kind == "too_short":
        message = f"{field} must not be empty"
    elif kind == "too_long":
        message = f"{field} must have at most {error['ctx']['max_length']} items"
    else:
        given = str(value) if isinstance(value, float) else _json_type(value)
        message = f"{field} must be {_EXPECTED.get(kind, 'of another type')}, not {given}"
    return InvalidRequest(message, field=field)
