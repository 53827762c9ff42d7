"""A request of OpenAI's Responses: it is a chat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from router.api import neutral, schema, structured
from router.api.fields import checked_text, json_type, refused, shown
from router.api.grammar_text import Structure
from router.api.structured import MAX_DESCRIPTION_BYTES, MAX_NAME_BYTES, SCHEMA
from router.api.template_fields import EFFORT, effort
from router.api.tools import FUNCTION, KINDS, NAMED_ONE, Tool, ToolChoice, document, named, nullable, tools
from router.api.turns import (
    MAX_ID_BYTES,
    MAX_PARTS,
    ChatMessage,
    Content,
    Id,
    Role,
    ToolCall,
    content_text,
    turn,
)

PARTS = ("input_text", "output_text", "text")
BESIDES = frozenset({"annotations", "logprobs"})  # of a part that an answer had: they change nothing
ITEM_FIELDS = frozenset({"type", "role", "content", "id", "status", "phase"})
CALL_FIELDS = frozenset({"type", "call_id", "name", "arguments", "id", "status"})
REASONING_FIELDS = frozenset({"type", "id", "summary", "content", "encrypted_content", "status"})
OUTPUT_FIELDS = frozenset({"type", "call_id", "output", "id", "status"})
MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512  # bytes
LOGPROBS = "message.output_text.logprobs"
INCLUDED = (  # the others are of what no answer has here
    LOGPROBS,
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
REASONING = ("effort", "summary", "generate_summary", "context", "mode")
FORMATS = ("text", "json_object", "json_schema")


class InputPart(BaseModel):
    """A part of an item's content, as the document tells it."""

    type: Literal["input_text", "output_text", "text"]
    text: Content


class InputItem(BaseModel):
    """An item of the input, as the document tells it: a message."""

    type: Literal["message"] = "message"
    role: Role
    content: Content | Annotated[list[InputPart], Field(max_length=MAX_PARTS)]


class CallItem(BaseModel):
    """An item of the input: a call that an answer made."""

    type: Literal["function_call"]
    call_id: Id
    name: Id
    arguments: Content


class ReasoningPart(BaseModel):
    """A part of what was thought, as the document tells it."""

    type: Literal["reasoning_text"]
    text: Content


class ReasoningItem(BaseModel):
    """An item of the input: what an answer thought."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS)] = []


class OutputItem(BaseModel):
    """An item of the input: what came of a call."""

    type: Literal["function_call_output"]
    call_id: Id
    output: Content | Annotated[list[InputPart], Field(max_length=MAX_PARTS)]


Turns = tuple[ChatMessage, ...]
InputItems = Annotated[
    list[InputItem | CallItem | OutputItem | ReasoningItem],
    Field(min_length=1, max_length=schema.MAX_MESSAGES),
]
Metadata = Annotated[dict[str, Content], Field(max_length=neutral.MAX_ENTRIES)]


def _input(value: object) -> Turns:
    if isinstance(value, str):
        return (turn("user", checked_text(value)),)
    if not isinstance(value, list):
        raise refused(f"must be a string or an array of items, not {json_type(value)}")
    if not 1 <= len(value) <= schema.MAX_MESSAGES:
        raise refused(f"must be from 1 to {schema.MAX_MESSAGES} items, not {len(value)}")
    turns = tuple(_joined(_item(index, item) for index, item in enumerate(value)))
    if not turns:
        raise refused("must have an item beside what was thought")
    return turns


def _joined(turns: Iterable[ChatMessage]) -> Iterator[ChatMessage]:
    """Yields the turns, where an assistant's calls are part of what it said before them, and what it thought
    of what it said after that."""
    last: ChatMessage | None = None
    for each in turns:
        if each.tool_calls and last is not None and last.role == "assistant":
            last = turn(
                "assistant", last.content, last.tool_calls + each.tool_calls, None, last.reasoning.strip()
            )
            continue
        if last is not None and _said(last):
            yield last
        elif last is not None and each.role == "assistant":
            each = turn("assistant", each.content, each.tool_calls, None, last.reasoning.strip())
        last = each
    if last is not None and _said(last):
        yield last


def _said(turn: ChatMessage) -> bool:
    """Returns False for what an assistant only thought: it belongs to what it says next."""
    return bool(not turn.reasoning or turn.content or turn.tool_calls)


def _item(index: int, item: object) -> ChatMessage:
    """Returns the turn. A refusal says of which item it is."""
    try:
        return _turn(index, item)
    except PydanticCustomError as error:
        what = error.message()
        raise refused(what if f"item {index}" in what else f"{what}, in item {index}") from None


def _turn(index: int, item: object) -> ChatMessage:
    if not isinstance(item, dict):
        raise refused(f"must be a string or an array of items; item {index} is {json_type(item)}")
    kind = item.get("type") or "message"
    if kind == "function_call":
        _known(index, item, CALL_FIELDS)
        name, arguments = _text(index, item, "name", MAX_ID_BYTES), _text(index, item, "arguments")
        return turn(
            "assistant", "", (ToolCall(_text(index, item, "call_id", MAX_ID_BYTES), name, arguments),)
        )
    if kind == "function_call_output":
        _known(index, item, OUTPUT_FIELDS)
        output = content_text(item.get("output"), PARTS, BESIDES)
        return turn("tool", output, tool_call_id=_text(index, item, "call_id", MAX_ID_BYTES))
    if kind == "reasoning":
        _known(index, item, REASONING_FIELDS)
        thought = content_text(item.get("content") or [], ("reasoning_text",))
        return turn("assistant", "", reasoning=thought or " ")  # which is no thought, and says nothing
    if kind != "message":
        raise refused(
            'must be items of type "message", "reasoning", "function_call" or "function_call_output"; '
            f"item {index} is of type {shown(kind)}"
        )
    if item.get("role") not in get_args(Role):
        roles = ", ".join(get_args(Role))
        raise refused(f"must have a role of {roles} in each item; item {index} has {shown(item.get('role'))}")
    _known(index, item, ITEM_FIELDS)
    return turn(item["role"], content_text(item.get("content"), PARTS, BESIDES))


def _known(index: int, item: Mapping[str, Any], fields: frozenset[str]) -> None:
    for name in item.keys() - fields:
        if item[name] is not None:
            raise refused(f"has the field {shown(name)} in item {index}, which is not supported")


def _text(index: int, item: Mapping[str, Any], name: str, most: int | None = None) -> str:
    if not isinstance(item.get(name), str):
        raise refused(f"must have {name} in item {index}, a string")
    return checked_text(item[name]) if most is None else checked_text(item[name], most)


def _metadata(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise refused("must be an object of strings")
    if len(value) > neutral.MAX_ENTRIES:
        raise refused(f"must have at most {neutral.MAX_ENTRIES} entries")
    for key, text in value.items():
        checked_text(key, MAX_METADATA_KEY)
        checked_text(text, MAX_METADATA_VALUE)
    return value


def _tools(value: object) -> tuple[Tool, ...]:
    return tools(value, lambda item: {name: item.get(name) for name in FUNCTION}, {"type", *FUNCTION})


def _choice(value: object) -> ToolChoice:
    if isinstance(value, str) and value in KINDS:
        return ToolChoice(value)
    if isinstance(value, dict) and value.get("type") == "function":
        return named(value)
    raise refused('must be auto, none, required, or a function: {"type": "function", "name": "..."}')


@dataclass(frozen=True, slots=True)
class JsonFormat(Structure):
    """A schema as the field `text` has it."""

    told: Mapping[str, Any]


def _format(value: object) -> Structure | None:
    """Returns what the text is to be like, of the field `text`."""
    if not isinstance(value, dict):
        raise refused(f"must be an object, not {json_type(value)}")
    told = value.get("format")
    if value.get("verbosity") not in (None, "medium") or any(
        value[name] is not None for name in value.keys() - {"format", "verbosity"}
    ):
        raise refused("must have format alone, and verbosity as medium if at all")
    if told is None:
        return None
    kind = told.get("type") if isinstance(told, dict) else told
    if not isinstance(told, dict) or kind not in FORMATS:
        raise refused(f"must have a format of type {', '.join(FORMATS)}, not {shown(kind)}")
    if kind != "json_schema":
        return structured.response_format(told)
    if not isinstance(told.get("schema"), dict | bool):
        raise refused("of type json_schema must have a schema at format.schema")
    inner = {name: each for name, each in told.items() if name != "type" and each is not None}
    found = structured.response_format({"type": "json_schema", "json_schema": inner})
    assert found is not None
    return JsonFormat("text.format.schema", found.kind, found.value, inner)


def _reasoning(value: object) -> str | None:
    """Returns the effort that it asks for."""
    if not isinstance(value, dict) or any(value[name] is not None for name in value.keys() - REASONING):
        raise refused(f"must be an object of {', '.join(REASONING)}")
    if value.get("summary") not in (None, "auto") or value.get("generate_summary") is not None:
        raise refused("must have no summary but auto: what the model thinks is told as it is")
    for name, only in (("context", "auto"), ("mode", "standard")):
        if value.get(name) not in (None, only):
            raise refused(f"must have {only} as {name}, if any")
    return None if value.get("effort") is None else effort(value["effort"])


def _include(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or any(each not in INCLUDED for each in value):
        raise refused(f"must be an array of any of {', '.join(INCLUDED)}")
    return tuple(value[: len(INCLUDED)])


TOOLS = document(
    {
        "type": "object",
        "required": ["name"],
        "properties": {"type": {"enum": ["function"]}, **nullable(FUNCTION)},
    }
)
CHOICE = {
    "anyOf": [
        {"enum": list(KINDS)},
        {
            "type": "object",
            "required": ["type", "name"],
            "properties": {"type": {"enum": ["function"]}, "name": NAMED_ONE},
        },
    ]
}
FORMAT = {
    "type": "object",
    "properties": {
        "format": {
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {"enum": list(FORMATS)},
                "name": {"type": "string", "maxLength": MAX_NAME_BYTES},
                "description": {"type": "string", "maxLength": MAX_DESCRIPTION_BYTES},
                "schema": SCHEMA,
                "strict": {"type": "boolean"},
            },
        },
        "verbosity": {"enum": ["medium"]},
    },
}
REASONING_SCHEMA = {
    "type": "object",
    "properties": {
        "effort": EFFORT,
        "summary": {"enum": ["auto", None]},
        "context": {"enum": ["auto", None]},
        "mode": {"enum": ["standard", None]},
    },
    "additionalProperties": False,
}
INCLUDE = {"type": "array", "maxItems": len(INCLUDED), "items": {"enum": list(INCLUDED)}}


class ResponsesRequest(schema.SharedFields):
    """POST /v1/responses."""

    neutral = neutral.RESPONSES
    names: ClassVar = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text",
        "function.parameters": "parameters",
    }

    input: Annotated[Turns, PlainValidator(_input, json_schema_input_type=Content | InputItems)] = Field(
        description="What the user says, or the items of a conversation."
    )
    instructions: Annotated[str | None, PlainValidator(checked_text, json_schema_input_type=Content)] = Field(
        default=None, description="What comes before the conversation."
    )
    max_output_tokens: int | None = Field(
        default=None, description="Absent = the rest of the context.", json_schema_extra={"minimum": 1}
    )
    metadata: Annotated[dict[str, str], PlainValidator(_metadata, json_schema_input_type=Metadata)] = Field(
        default_factory=dict, description="The answer repeats it."
    )
    tools: Annotated[tuple[Tool, ...], PlainValidator(_tools), WithJsonSchema(TOOLS)] = Field(
        default=(), description="Functions that the model may call."
    )
    tool_choice: Annotated[ToolChoice, PlainValidator(_choice), WithJsonSchema(CHOICE)] = Field(
        default=ToolChoice(), description="auto, none, required, or the one that must be called."
    )
    parallel_tool_calls: bool = Field(default=True, description="False = one call at most.")
    text: Annotated[Structure | None, PlainValidator(_format), WithJsonSchema(FORMAT)] = Field(
        default=None, description="What the text is to be like: text, json_object or json_schema."
    )
    include: Annotated[tuple[str, ...], PlainValidator(_include), WithJsonSchema(INCLUDE)] = Field(
        default=(), description="Log-probabilities of the output, if asked for."
    )
    reasoning: Annotated[str | None, PlainValidator(_reasoning), WithJsonSchema(REASONING_SCHEMA)] = Field(
        default=None, description="How much to think, as the chat template knows it."
    )
    top_logprobs: int = Field(
        default=0,
        description="Of so many likeliest tokens at each position.",
        json_schema_extra=dict(schema.TOP_LOGPROBS.json_schema()),
    )

    def as_chat(self) -> schema.ChatRequest:
        before = (turn("system", self.instructions),) if self.instructions else ()
        return schema.as_chat(
            self,
            before + self.input,
            max_tokens=self.max_output_tokens,
            tools=self.tools,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self.text,
            reasoning_effort=self.reasoning,
            logprobs=LOGPROBS in self.include or self.top_logprobs > 0,
            top_logprobs=self.top_logprobs,
        )

    def repeated(self) -> Mapping[str, Any]:
        """Returns what the answer repeats of it, and a session does not hold."""
        told = {name: getattr(self, name) for name in ("instructions", "max_output_tokens", "metadata")}
        choice: object = self.tool_choice.kind
        if self.tool_choice.name:
            choice = {"type": "function", "name": self.tool_choice.name}
        return {
            **told,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning": {"effort": self.reasoning, "summary": None},
            "text": {"format": _repeated_format(self.text)},
            "tool_choice": choice,
            "tools": [_repeated_tool(tool) for tool in self.tools],
        }


def _repeated_tool(tool: Tool) -> Mapping[str, Any]:
    told = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", **told, "strict": tool.strict}


def _repeated_format(asked: Structure | None) -> Mapping[str, Any]:
    if asked is None:
        return {"type": "text"}
    if asked.field == "response_format":
        return {"type": "json_object"}
    assert isinstance(asked, JsonFormat)
    return {"type": "json_schema", "name": "schema", "strict": True, **asked.told}
