"""A request of Anthropic's Messages: it is a chat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema, model_validator

from outrider.errors import InvalidRequest
from router.api import neutral, schema
from router.api.body import MAX_BODY_BYTES
from router.api.fields import Fields, at_fault, checked_text, json_type, refused, shown, sized
from router.api.grammar_text import Structure
from router.api.structured import MAX_DESCRIPTION_BYTES, SCHEMA, response_format
from router.api.template_fields import effort_variables
from router.api.tools import NAMED_ONE, Tool, ToolChoice, document, tools
from router.api.turns import (
    MAX_ID_BYTES,
    MAX_PARTS,
    PART_FIELDS,
    ChatMessage,
    Content,
    Contents,
    Id,
    TextPart,
    ToolCall,
    content_text,
    part_text,
    turn,
)
from router.rendering import Rendering

BESIDES = frozenset({"citations"})  # of a part that an answer had: it changes nothing
PARTS = ("text", "thinking", "tool_use", "tool_result")
THINKING_FIELDS = frozenset({"type", "thinking", "signature"})
USE_FIELDS = frozenset({"type", "id", "name", "input", "cache_control", "caller"})
RESULT_FIELDS = frozenset({"type", "tool_use_id", "content", "is_error", "cache_control"})
TOOL_FIELDS = {"type", "name", "description", "input_schema", "strict", "cache_control"}
TOOL_FIELDS |= {"eager_input_streaming"}  # arguments are told as they are written
CHOICES: Mapping[str, str] = {"auto": "auto", "none": "none", "any": "required"}

OUTPUT_EFFORTS = ("low", "medium", "high", "xhigh", "max")
EFFORTS: Mapping[str, str] = {"disabled": "none", "enabled": "medium", "adaptive": "medium"}

AUTO = ToolChoice()

Speaker = Literal["user", "assistant"]


@dataclass(frozen=True, slots=True)
class Said:
    """What one turn holds."""

    text: str = ""
    reasoning: str = ""
    uses: tuple[ToolCall, ...] = ()
    results: tuple[tuple[str, str], ...] = ()  # (id of the call, what came of it)


def _speaker(value: object) -> str:
    if value not in get_args(Speaker):
        raise refused(f"must be user or assistant, not {shown(value)}")
    return str(value)


def _text(value: object) -> str:
    return content_text(value, ignored=BESIDES)


def _said(value: object) -> Said:
    if not isinstance(value, list):
        return Said(checked_text(value))
    if len(value) > MAX_PARTS:
        raise refused(f"must be at most {MAX_PARTS} parts, not {len(value)}")
    text, reasoning, uses, results = "", "", [], []
    for index, part in enumerate(value):
        match part.get("type") if isinstance(part, dict) else None:
            case "thinking":
                _known(index, part, THINKING_FIELDS)
                reasoning += checked_text(part.get("thinking"))
            case "tool_use":
                uses.append(_use(index, part))
            case "tool_result":
                _known(index, part, RESULT_FIELDS)
                content = part.get("content")
                told = "" if content is None else content_text(content, ignored=BESIDES)
                results.append((_id(index, part, "tool_use_id"), told))
            case _:
                text += part_text(index, part, PARTS, PART_FIELDS | BESIDES)
    return Said(text, reasoning, tuple(uses), tuple(results))


def _use(index: int, part: Mapping[str, Any]) -> ToolCall:
    _known(index, part, USE_FIELDS)
    if not isinstance(part.get("input"), dict):
        raise refused(f"must have an object as input of a tool_use; that of part {index} is none")
    arguments = json.dumps(sized(part["input"], MAX_BODY_BYTES), ensure_ascii=False)
    name = checked_text(part.get("name"), MAX_ID_BYTES)
    return ToolCall(_id(index, part, "id"), name, checked_text(arguments))


def _id(index: int, part: Mapping[str, Any], name: str) -> str:
    if not isinstance(part.get(name), str):
        raise refused(f"must have {name} in part {index}, a string")
    return checked_text(part[name], MAX_ID_BYTES)


def _known(index: int, part: Mapping[str, Any], fields: frozenset[str]) -> None:
    for name in part.keys() - fields:
        if part[name] is not None:
            raise refused(f"has the field {shown(name)} in part {index}, which is not supported")


def _tools(value: object) -> tuple[Tool, ...]:
    return tools(value, _described, TOOL_FIELDS, "custom")


def _described(item: Mapping[str, Any]) -> Mapping[str, Any]:
    names = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
    return {told: item.get(name) for name, told in names.items()}


@dataclass(frozen=True, slots=True)
class Choice:
    """Which tools are to be called, and whether several at once."""

    of: ToolChoice = AUTO
    several: bool = True


def _thinking(value: object) -> str:
    """Returns the effort that it asks for. How much is thought is bounded by max_tokens alone."""
    if not isinstance(value, dict) or value.get("type") not in tuple(EFFORTS):
        raise refused(f"must be an object of type {', '.join(EFFORTS)}")
    for name in value.keys() - {"type", "budget_tokens", "display"}:
        raise refused(f"has the field {shown(name)}, which is not supported")
    if type(value.get("budget_tokens", 0)) is not int or value.get("display") not in (None, "summarized"):
        raise refused("must have a number as budget_tokens, and summarized as display, if any")
    return EFFORTS[value["type"]]


def _choice(value: object) -> Choice:
    if not isinstance(value, dict):
        raise refused(f"must be an object, not {json_type(value)}")
    for name in value.keys() - {"type", "name", "disable_parallel_tool_use"}:
        if value[name] is not None:
            raise refused(f"has the field {shown(name)}, which is not supported")
    single = value.get("disable_parallel_tool_use")
    if not (single is None or isinstance(single, bool)):
        raise refused("must have true or false as disable_parallel_tool_use")
    kind, name = value.get("type"), value.get("name")
    if kind == "tool" and isinstance(name, str):
        return Choice(ToolChoice("named", checked_text(name, MAX_ID_BYTES)), not single)
    if not isinstance(kind, str) or kind not in CHOICES:
        raise refused("must be of type auto, any, none, or tool with a name")
    return Choice(ToolChoice(CHOICES[kind]), not single)


@dataclass(frozen=True, slots=True)
class Output:
    """How much effort an answer is to take, and what its text is to be like."""

    effort: str | None = None
    format: Structure | None = None


def _output(value: object) -> Output:
    if not isinstance(value, dict):
        raise refused(f"must be an object, not {json_type(value)}")
    for name in value.keys() - {"effort", "format"}:
        if value[name] is not None:
            raise refused(f"has the field {shown(name)}, which is not supported")
    effort, form = value.get("effort"), value.get("format")
    if effort not in (None, *OUTPUT_EFFORTS):
        raise refused(f"must have an effort of {', '.join(OUTPUT_EFFORTS)}, not {shown(effort)}")
    if form is None:
        return Output(effort)
    if not isinstance(form, dict) or form.get("type") != "json_schema" or form.keys() - {"type", "schema"}:
        raise refused("must have a format of type json_schema with a schema, and nothing else")
    if not isinstance(form.get("schema"), dict | bool):
        raise refused("must have a schema at format.schema")
    found = response_format({"type": "json_schema", "json_schema": {"schema": form["schema"]}})
    assert found is not None
    return Output(effort, Structure("output_config.format.schema", found.kind, found.value))


class ThinkingPart(BaseModel):
    """What the assistant thought."""

    type: Literal["thinking"]
    thinking: Content
    signature: Content = ""


class UsePart(BaseModel):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: Id
    name: Id
    input: Annotated[dict[str, Any], Field(max_length=schema.MAX_STOP_BYTES)]


class ResultPart(BaseModel):
    """What came of a call."""

    type: Literal["tool_result"]
    tool_use_id: Id
    content: Contents = ""
    is_error: bool = False


Text = Annotated[str, PlainValidator(_text, json_schema_input_type=Contents)]
SaidOrParts = (
    Content | Annotated[list[TextPart | ThinkingPart | UsePart | ResultPart], Field(max_length=MAX_PARTS)]
)


class Turn(Fields):
    """One turn of a conversation."""

    role: Annotated[str, PlainValidator(_speaker, json_schema_input_type=Speaker)]
    content: Annotated[Said, PlainValidator(_said, json_schema_input_type=SaidOrParts)]

    @model_validator(mode="after")
    def _whose(self) -> Turn:
        for name, part in (("tool_use", self.content.uses), ("thinking", self.content.reasoning)):
            if self.role == "user" and part:
                raise at_fault("content", f"has a {name}, which is the assistant's only")
        if self.role == "assistant" and self.content.results:
            raise at_fault("content", "has a tool_result, which is the user's only")
        return self

    def as_chat(self) -> Iterator[ChatMessage]:
        """Yields the turns of a chat that this is: what came of calls is said by tools."""
        for id, text in self.content.results:
            yield turn("tool", text, tool_call_id=id)
        if self.content.text or self.content.uses or not self.content.results:
            yield turn(self.role, self.content.text, self.content.uses, None, self.content.reasoning)


TOOLS = document(
    {
        "type": "object",
        "required": ["name", "input_schema"],
        "properties": {
            "type": {"enum": ["custom"]},
            "name": NAMED_ONE,
            "description": {"type": "string", "maxLength": MAX_DESCRIPTION_BYTES},
            "input_schema": SCHEMA,
        },
    }
)
CHOICE = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": [*CHOICES, "tool"]},
        "name": NAMED_ONE,
        "disable_parallel_tool_use": {"type": ["boolean", "null"]},
    },
}
THINKING = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": list(EFFORTS)},
        "budget_tokens": {"type": "integer"},
        "display": {"enum": ["summarized", None]},
    },
}
OUTPUT = {
    "type": "object",
    "properties": {
        "effort": {"enum": [*OUTPUT_EFFORTS, None]},
        "format": {
            "type": ["object", "null"],
            "required": ["type", "schema"],
            "properties": {"type": {"enum": ["json_schema"]}, "schema": SCHEMA},
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
}
Thinking = Annotated[str, PlainValidator(_thinking), WithJsonSchema(THINKING)]
OfOutput = Annotated[Output, PlainValidator(_output), WithJsonSchema(OUTPUT)]
Turns = Annotated[list[Turn], schema.Messages]
OfTools = Annotated[tuple[Tool, ...], PlainValidator(_tools), WithJsonSchema(TOOLS)]
OfChoice = Annotated[Choice, PlainValidator(_choice), WithJsonSchema(CHOICE)]


class CountRequest(schema.ModelFields):
    """POST /v1/messages/count_tokens."""

    neutral = neutral.MESSAGES

    messages: Turns
    system: Text = Field(default="", description="What comes before the conversation.")
    tools: OfTools = Field(default=(), description="What the model may call.")
    tool_choice: OfChoice = Field(default=Choice(), description="Taken, and changes nothing.")
    thinking: Thinking | None = Field(default=None, description="Whether to think, as the template knows it.")
    output_config: OfOutput = Field(default=Output(), description="How much to think.")

    @property
    def rendering(self) -> Rendering:
        return Rendering(variables=effort_variables(effort(self)))


class MessagesRequest(schema.SharedFields):
    """POST /v1/messages."""

    neutral = neutral.MESSAGES
    names: ClassVar = {"function.parameters": "input_schema"}

    messages: Turns
    system: Text = Field(default="", description="What comes before the conversation.")
    max_tokens: int = Field(description="Most output tokens.", json_schema_extra={"minimum": 1})
    stop_sequences: Annotated[
        tuple[str, ...], PlainValidator(schema.stop_strings, json_schema_input_type=schema.Stop)
    ] = Field(default=(), description="The text ends before the first of them.")
    tools: OfTools = Field(default=(), description="What the model may call.")
    tool_choice: OfChoice = Field(default=Choice(), description="auto, any, none, or the tool to be called.")
    thinking: Thinking | None = Field(default=None, description="Whether to think, as the template knows it.")
    output_config: OfOutput = Field(
        default=Output(), description="How much to think, and a schema that the text obeys."
    )

    def as_chat(self) -> schema.ChatRequest:
        return schema.as_chat(
            self,
            turns(self),
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            reasoning_effort=effort(self),
            response_format=self.output_config.format,
            tools=self.tools,
            tool_choice=self.tool_choice.of,
            parallel_tool_calls=self.tool_choice.several,
        )


def effort(body: MessagesRequest | CountRequest) -> str | None:
    """Returns how much to think, as a chat says it; None = as the template has it."""
    return "none" if body.thinking == "none" else body.output_config.effort or body.thinking


def turns(body: MessagesRequest | CountRequest) -> Iterator[ChatMessage]:
    """Yields the turns of the chat. Raises InvalidRequest if the last one is the assistant's."""
    if body.messages[-1].role == "assistant":
        raise InvalidRequest(
            "messages must end with a turn of the user: to continue the assistant's is not supported by this "
            "server",
            field="messages",
        )
    if body.system:
        yield turn("system", body.system)
    for each in body.messages:
        yield from each.as_chat()
