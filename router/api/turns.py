"""The turns of a conversation, as JSON names and types: what was said, and which tools were called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from outrider.errors import InvalidRequest
from router.api import neutral
from router.api.body import MAX_BODY_BYTES, decoded
from router.api.fields import Fields, at_fault, checked_text, json_type, refused, shown, sized
from router.api.tools import MAX_NAME_BYTES, MAX_TOOLS

MAX_PARTS = 1024  # of one message
MAX_ID_BYTES = 256  # of a call


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant made."""

    id: str
    name: str
    arguments: str  # as it wrote them: JSON, mostly

    def for_template(self) -> Mapping[str, Any]:
        """Returns the call as chat templates know it: its arguments as a text, unless they are JSON."""
        arguments: object = self.arguments
        with suppress(InvalidRequest, PydanticCustomError):
            arguments = sized(decoded((self.arguments or "{}").encode()), MAX_BODY_BYTES)
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


def content_text(value: object, kinds: Sequence[str] = ("text",), ignored: Set[str] = frozenset()) -> str:
    """Returns the text of a content: a string, or parts of these types, which may have the ignored fields."""
    fields = PART_FIELDS | ignored
    if not isinstance(value, list):
        return checked_text(value)
    if len(value) > MAX_PARTS:
        raise refused(f"must be at most {MAX_PARTS} parts, not {len(value)}")
    return "".join(part_text(index, part, kinds, fields) for index, part in enumerate(value))


def part_text(index: int, part: object, kinds: Sequence[str], fields: Set[str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in kinds:
        found = f"of type {shown(kind)}" if isinstance(part, dict) else json_type(part)
        told = " or ".join(f'"{one}"' for one in kinds)
        raise refused(f"must be a string or parts of type {told}; part {index} is {found}")
    if "text" not in part or any(part[name] is not None for name in part.keys() - fields):
        raise refused(f'must have parts of the fields "type" and "text" only; part {index} has not')
    for name in CACHE_FIELDS:
        fault = neutral.OBJECT.fault(part.get(name) or {})
        if fault is not None:
            raise refused(f"{fault} in {name} of part {index}")
    return checked_text(part["text"])


def _role(value: object) -> str:
    if value not in get_args(ChatRole):
        raise refused(f"must be one of {', '.join(get_args(ChatRole))}, not {shown(value)}")
    return str(value)


def _tool_calls(value: object) -> tuple[ToolCall, ...]:
    if not isinstance(value, list):
        raise refused(f"must be an array, not {json_type(value)}")
    if len(value) > MAX_TOOLS:
        raise refused(f"must be at most {MAX_TOOLS} calls, not {len(value)}")
    return tuple(_tool_call(index, call) for index, call in enumerate(value))


def _tool_call(index: int, call: object) -> ToolCall:
    if not isinstance(call, dict) or call.get("type", "function") != "function":
        raise refused(f'must be calls of type "function"; call {index} is none')
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise refused(f"must have function.name and function.arguments in each; call {index} has not")
    arguments = function.get("arguments")
    return ToolCall(
        checked_text(call.get("id") or "", MAX_ID_BYTES),
        checked_text(function["name"], MAX_NAME_BYTES),
        checked_text("" if arguments is None else arguments),
    )


def _id(value: object) -> str:
    return checked_text(value, MAX_ID_BYTES)


Ignored = Annotated[dict[str, Any] | None, Field(max_length=neutral.MAX_ENTRIES)]


class TextPart(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: Annotated[str, Field(max_length=MAX_BODY_BYTES)]
    cache_control: Ignored = Field(default=None, description="Taken, and changes nothing.")
    prompt_cache_breakpoint: Ignored = Field(default=None, description="Taken, and changes nothing.")


CACHE_FIELDS = ("cache_control", "prompt_cache_breakpoint")  # Anthropic's and OpenAI's
PART_FIELDS = TextPart.model_fields.keys()

# What the fields with checks of their own may hold, as the API's document tells it.
Role = Literal["system", "developer", "user", "assistant"]
ChatRole = Literal["system", "developer", "user", "assistant", "tool"]
Content = Annotated[str, Field(max_length=MAX_BODY_BYTES)]
Contents = Content | Annotated[list[TextPart], Field(max_length=MAX_PARTS)]
Id = Annotated[str, Field(max_length=MAX_ID_BYTES)]


class CalledFunction(BaseModel):
    """What was called, as the document tells it."""

    name: Annotated[str, Field(max_length=MAX_NAME_BYTES)]
    arguments: Content = Field(description="JSON.")


class CallOfTool(BaseModel):
    """A call in a message, as the document tells it."""

    id: Id
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Fields):
    """One turn of a conversation."""

    neutral = neutral.MESSAGE

    role: Annotated[str, PlainValidator(_role, json_schema_input_type=ChatRole)]
    content: Annotated[str, PlainValidator(content_text, json_schema_input_type=Contents)] = Field(
        default="", description="May be absent beside tool_calls."
    )
    reasoning: Annotated[str, PlainValidator(checked_text, json_schema_input_type=Content)] = Field(
        default="", description="Of an assistant: what it thought before it said that."
    )
    reasoning_content: Annotated[str, PlainValidator(checked_text, json_schema_input_type=Content)] = Field(
        default="", description="The same, under its other name."
    )
    tool_calls: Annotated[
        tuple[ToolCall, ...],
        PlainValidator(
            _tool_calls, json_schema_input_type=Annotated[list[CallOfTool], Field(max_length=MAX_TOOLS)]
        ),
    ] = Field(default=(), description="Of an assistant.")
    tool_call_id: Annotated[str | None, PlainValidator(_id, json_schema_input_type=Id)] = Field(
        default=None, description="Of a tool: the call that this answers."
    )

    @model_validator(mode="after")
    def _whole(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise at_fault("tool_calls", "are an assistant's only")
        for name in ("reasoning", "reasoning_content"):
            if getattr(self, name) and self.role != "assistant":
                raise at_fault(name, "is an assistant's only")
        if self.tool_call_id is not None and self.role != "tool":
            raise at_fault("tool_call_id", "is a tool's only")
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise at_fault("content", "is required")
        return self

    def for_template(self) -> Mapping[str, Any]:
        """Returns the turn as chat templates know it: `developer` is OpenAI's newer name of `system`."""
        turn: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content,
        }
        if thought := self.reasoning or self.reasoning_content:
            turn["reasoning_content"] = thought
        if self.tool_calls:
            turn["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        return turn


def turn(
    role: str,
    content: str,
    tool_calls: tuple[ToolCall, ...] = (),
    tool_call_id: str | None = None,
    reasoning: str = "",
) -> ChatMessage:
    """Returns a turn of another route's conversation, whose parts were checked there."""
    return ChatMessage.model_construct(
        role=role, content=content, tool_calls=tool_calls, tool_call_id=tool_call_id, reasoning=reasoning
    )
