"""The fields of a request, as JSON names, types and ranges: what may be written down at all.

Types are strict: no number from a string, no integer from a boolean. A null is an absent field.
Ranges are told here and checked in `validation`, with the limits that depend on the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import ErrorDetails

from outrider.errors import InvalidRequest
from outrider.sampling.params import BIASES, MAX_BIASES, RANGES, SamplingParams
from outrider.sampling.range import Range
from outrider.wire.logprobs import MAX_TOP_LOGPROBS
from outrider.wire.session import MAX_PRIORITY
from router.api import neutral, structured
from router.api.body import MAX_BODY_BYTES, MAX_VALUES
from router.api.fields import Fields, checked_text, json_type, refused, shown
from router.api.grammar_text import Structure
from router.api.template_fields import TemplateFields
from router.api.text_fields import MAX_ID, TextFields, token_ids
from router.api.tools import ChatChoice, ChatTools, ToolChoice
from router.api.turns import ChatMessage, Content, Contents, content_text

# Every text and every list has a most: what follows takes time and memory that grow with them.
MAX_STOPS = 16
MAX_STOP_BYTES = 1024
MAX_PROMPTS = 128
MAX_MESSAGES = 4096
CHOICES = Range(1, 64)
TOP_LOGPROBS = Range(0, MAX_TOP_LOGPROBS)
MAX_CHOICES = 128  # of all prompts of a request
MAX_MODEL_BYTES = 256
SPECULATIVE_TOKENS = Range(0, 1024, words="from {low} (off) to {high}, or absent (adaptive)")
PRIORITY = Range(0, MAX_PRIORITY, words="from {low} (at once) to {high} (in no hurry)")
LEAST_TOKENS = 1  # of output
MAX_SALT_BYTES = 1024


def _model(value: object) -> str:
    return checked_text(value, MAX_MODEL_BYTES)


def _ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise refused(f"must be an array of token ids, not {json_type(value)}")
    return token_ids(value)


def _prompts(value: object) -> list[str | tuple[int, ...]]:
    if isinstance(value, str):
        return [checked_text(value)]
    if not isinstance(value, list):
        raise refused(
            "must be a string, an array of strings, an array of token ids or an array of those, "
            f"not {json_type(value)}"
        )
    if not value:
        raise refused("must not be empty")
    if not isinstance(value[0], str | list):
        return [token_ids(value)]
    if len(value) > MAX_PROMPTS:
        raise refused(f"must be at most {MAX_PROMPTS} prompts, not {len(value)}")
    for index, item in enumerate(value):
        if type(item) is not type(value[0]):
            kind = json_type(value[0])
            raise refused(f"must not mix kinds: item 0 is {kind} and item {index} is {json_type(item)}")
    return [checked_text(item) if isinstance(item, str) else token_ids(item) for item in value]


def stop_strings(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise refused(f"must be a string or an array of strings, not {json_type(value)}")
    if len(stops) > MAX_STOPS:
        raise refused(f"must be at most {MAX_STOPS} strings, not {len(stops)}")
    if "" in stops:
        raise refused("must not hold an empty string")
    return tuple(checked_text(stop, MAX_STOP_BYTES) for stop in stops)


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise refused(f"must be an object from token ids to numbers, not {json_type(value)}")
    if len(value) > MAX_BIASES:
        raise refused(f"must have at most {MAX_BIASES} token ids, not {len(value)}")
    biases = {}
    for key, bias in value.items():
        if not (
            type(key) is int or (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20)
        ):
            raise refused(f"must have token ids as keys, not {shown(key)}")
        if type(bias) not in (int, float):
            raise refused(f"must have numbers as values; that of token id {key} is {json_type(bias)}")
        if int(key) in biases:
            raise refused(f"must have different token ids as keys; {int(key)} is there twice")
        try:
            biases[int(key)] = float(bias)
        except OverflowError:
            raise refused(f"must be {BIASES}; that of token id {key} is too large a number") from None
    return biases


def _salt(value: object) -> str:
    salt = checked_text(value, MAX_SALT_BYTES)
    if not salt:
        raise refused("must not be empty: leave it out, or send what others cannot guess")
    return salt


def _prediction(value: object) -> str:
    if not isinstance(value, dict) or value.get("type") != "content" or value.keys() - {"type", "content"}:
        raise refused('must be an object {"type": "content", "content": ...}')
    return content_text(value.get("content"))


# What the fields with checks of their own may hold, as the API's document tells it.
Text = Annotated[str, Field(min_length=1, max_length=MAX_BODY_BYTES)]
ModelName = Annotated[str, Field(max_length=MAX_MODEL_BYTES)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_BYTES)]
TokenId = Annotated[int, Field(ge=0, le=MAX_ID)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_VALUES)]
Several = Field(min_length=1, max_length=MAX_PROMPTS)
Prompt = Text | TokenIds | Annotated[list[Text], Several] | Annotated[list[TokenIds], Several]
Stop = StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)]
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


Finite = Annotated[float, Field(allow_inf_nan=False)]


class Prediction(BaseModel):
    """OpenAI's predicted output, as the document tells it."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["content"]
    content: Contents


class StreamOptions(Fields):
    """What a stream carries besides the text."""

    neutral = neutral.STREAM_OPTIONS

    include_usage: bool = Field(default=False, description="A last chunk with usage and statistics.")
    continuous_usage_stats: bool = Field(default=False, description="Usage so far on every chunk.")


class SharedFields(Fields):
    """The fields that a request for text has on every route."""

    model: Annotated[str, PlainValidator(_model, json_schema_input_type=ModelName)] = Field(
        default="", description="Empty = the one that is served."
    )
    temperature: Finite = _sampling("temperature", "0 = greedy.")
    top_p: Finite = _sampling("top_p")
    top_k: int = _sampling("top_k", "0 or -1 = off.", minimum=-1)
    seed: int | None = _ranged(
        None, RANGES["seed"].json_schema(), "Replays an answer; absent = drawn, and returned."
    )
    stream: bool = Field(default=False, description="Send the text as it comes.")
    num_speculative_tokens: int | None = _ranged(
        None,
        SPECULATIVE_TOKENS.json_schema(),
        "Most draft tokens a step; absent = adaptive, 0 = off.",
    )
    priority: int = _ranged(0, PRIORITY.json_schema(), "Requests of a greater one give way to those of less.")
    cache_salt: Annotated[str | None, PlainValidator(_salt, json_schema_input_type=Salt)] = Field(
        default=None, description="Cached prefixes are shared with requests of the same salt only."
    )


class GenerationFields(SharedFields, TextFields):
    """The fields that completions and chat have."""

    max_tokens: int | None = _ranged(
        None,
        {"minimum": LEAST_TOKENS},
        "Most output tokens; absent = 16, for chat the rest of the context.",
    )
    max_completion_tokens: int | None = _ranged(
        None, {"minimum": LEAST_TOKENS}, "OpenAI's newer name of max_tokens."
    )
    min_p: Finite = _sampling("min_p")
    stop: Annotated[tuple[str, ...], PlainValidator(stop_strings, json_schema_input_type=Stop)] = Field(
        default=(), description="The text ends before the first of them."
    )
    n: int = _ranged(1, CHOICES.json_schema(), "Answers to each prompt; the seed of answer i is seed + i.")
    presence_penalty: Finite = _sampling("presence_penalty")
    frequency_penalty: Finite = _sampling("frequency_penalty")
    repetition_penalty: Finite = _sampling("repetition_penalty")
    logit_bias: Annotated[dict[int, float], PlainValidator(_logit_bias), WithJsonSchema(BIASES_SCHEMA)] = (
        Field(default_factory=dict, description="By token id: added to its logit.")
    )
    prediction: Annotated[str, PlainValidator(_prediction, json_schema_input_type=Prediction)] = Field(
        default="", description="A text that the answer is expected to be like: then it comes sooner."
    )
    ignore_eos: bool = Field(default=False, description="Go on past the end of the text.")
    return_speculation: bool = Field(
        default=False, description="Say where each token came from: of which draft, or the target's own."
    )
    stream_options: StreamOptions = StreamOptions()
    response_format: Annotated[
        Structure | None,
        PlainValidator(structured.response_format),
        WithJsonSchema(structured.RESPONSE_FORMAT),
    ] = Field(default=None, description="text, json_object, json_schema or structural_tag.")
    structured_outputs: Annotated[
        Structure | None,
        PlainValidator(structured.structured_outputs),
        WithJsonSchema(structured.STRUCTURED_OUTPUTS),
    ] = Field(default=None, description="One of json, regex, choice, grammar, json_object, structural_tag.")


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    neutral = neutral.COMPLETION

    prompt: Annotated[
        list[str | tuple[int, ...]], PlainValidator(_prompts, json_schema_input_type=Prompt)
    ] = Field(description="Text or token ids, or several of either: then there is a choice for each.")
    max_tokens: int | None = _ranged(
        None, {"minimum": 0}, "Most output tokens; absent = 16; 0 only with echo = true."
    )
    suffix: Annotated[str, PlainValidator(checked_text, json_schema_input_type=Content)] = Field(
        default="", description="What comes after the text, which is written to stand between."
    )
    echo: bool = Field(default=False, description="The text begins with the prompt.")
    logprobs: int | None = _ranged(
        None, TOP_LOGPROBS.json_schema(), "Log-probabilities of the output, and of so many likeliest tokens."
    )


Messages = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)


class ChatRequest(GenerationFields, TemplateFields):
    """POST /v1/chat/completions."""

    neutral = neutral.CHAT

    messages: Annotated[list[ChatMessage], Messages]
    logprobs: bool = Field(default=False, description="Log-probabilities of the output.")
    top_logprobs: int = _ranged(
        0, TOP_LOGPROBS.json_schema(), "Of so many likeliest tokens at each position, with logprobs = true."
    )
    tools: ChatTools = Field(default=(), description="Functions that the model may call.")
    tool_choice: ChatChoice = Field(
        default=ToolChoice(), description="auto, none, required, or the one that must be called."
    )
    parallel_tool_calls: bool = Field(default=True, description="False = one call at most.")


def as_chat(body: SharedFields, turns: Iterable[ChatMessage], **fields: Any) -> ChatRequest:
    """Returns the chat that another route's request asks for. `fields`: of the chat, beside the shared
    ones."""
    shared = {name: getattr(body, name) for name in SharedFields.model_fields}
    return ChatRequest.model_construct(messages=list(turns), **shared, **fields)


class ModelFields(Fields):
    """What the requests about tokens have in common."""

    model: Annotated[str, PlainValidator(_model, json_schema_input_type=ModelName)] = ""


class TokenizeRequest(ModelFields, TemplateFields):
    """POST /tokenize."""

    prompt: Annotated[str | None, PlainValidator(checked_text, json_schema_input_type=Content)] = None
    messages: Annotated[list[ChatMessage], Messages] | None = None
    tools: ChatTools = Field(default=(), description="As of the chat.")
    add_special_tokens: bool | None = Field(
        default=None, description="Absent = true for a prompt, false for messages."
    )
    return_token_strs: bool = False


class DetokenizeRequest(ModelFields):
    """POST /detokenize."""

    tokens: Annotated[
        tuple[int, ...],
        PlainValidator(_ids, json_schema_input_type=Annotated[list[TokenId], Field(max_length=MAX_VALUES)]),
    ]


Request = TypeVar("Request", bound=Fields)


def parse(kind: type[Request], body: object) -> Request:
    """The request that a decoded JSON body is. Raises InvalidRequest naming the first field at fault."""
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {json_type(body)}")
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
    if kind == "at_fault":
        told = error["ctx"]
        name = f"{field}.{told['name']}" if field else told["name"]
        message = f"unknown field {name}" if told["fault"] is None else f"{name} {told['fault']}"
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
        given = str(value) if isinstance(value, float) else json_type(value)
        message = f"{field} must be {_EXPECTED.get(kind, 'of another type')}, not {given}"
    return InvalidRequest(message, field=field)
