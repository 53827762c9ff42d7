"""The tools that a model may call: a request's fields, and the grammar of a call that it must make."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from outrider.errors import InvalidRequest
from outrider.grammar import MAX_GRAMMAR_BYTES, WHITE_SPACE
from router.api.fields import checked_text, json_type, refused, shown, sized
from router.api.grammar_text import Structure
from router.api.structured import MAX_DESCRIPTION_BYTES, MAX_SCHEMA_BYTES, SCHEMA, compiled
from router.requests import ServedModel
from router.tokenizer import Tokenizer
from router.tool_formats import ToolFormat, grammar

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 2**18  # of all of them, as JSON
MAX_NAME_BYTES = 128
NAME = re.compile(r"[A-Za-z0-9_.:/-]+")
KINDS = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function of the client's that a model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None  # a JSON schema; None = not told
    strict: bool = False  # the arguments of a call obey it, too, where the model is free to call

    def for_template(self) -> Mapping[str, Any]:
        """Returns the tool as chat templates know it."""
        told = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {
            "type": "function",
            "function": {name: value for name, value in told.items() if value is not None},
        }

    @property
    def schema(self) -> Mapping[str, object]:
        """Returns the schema of its arguments, an object at least, written as models write it."""
        return {**ANY_ARGUMENTS, **(NO_ARGUMENTS if self.parameters is None else self.parameters)}


NO_ARGUMENTS: Mapping[str, Any] = {"properties": {}, "additionalProperties": False}
ANY_ARGUMENTS = {"type": "object", "x-guidance": {"whitespace_pattern": WHITE_SPACE}}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools are to be called."""

    kind: str = "auto"  # one of KINDS, or "named"
    name: str = ""

    @property
    def forced(self) -> bool:
        return self.kind in ("required", "named")


NAMED_ONE = {"type": "string", "minLength": 1, "maxLength": MAX_NAME_BYTES, "pattern": f"^{NAME.pattern}$"}
FUNCTION = {
    "name": NAMED_ONE,
    "description": {"type": "string", "maxLength": MAX_DESCRIPTION_BYTES},
    "parameters": SCHEMA,
    "strict": {"type": "boolean"},
}
TYPE = {"enum": ["function"]}


def nullable(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields as the document has them, of which all but the names may be null."""
    return {
        name: field if name in ("name", "type", "function") else {"anyOf": [field, {"type": "null"}]}
        for name, field in fields.items()
    }


def document(item: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a list of such tools is in the API's document."""
    return {"type": "array", "maxItems": MAX_TOOLS, "items": item}


CHAT_TOOLS = document(
    {
        "type": "object",
        "required": ["function"],
        "properties": {
            "type": TYPE,
            "function": {"type": "object", "required": ["name"], "properties": nullable(FUNCTION)},
        },
    }
)
NAMED = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": TYPE,
        "function": {"type": "object", "required": ["name"], "properties": {"name": NAMED_ONE}},
    },
}
CHAT_CHOICE = {"anyOf": [{"enum": list(KINDS)}, NAMED]}


def chat_tools(value: object) -> tuple[Tool, ...]:
    """Returns the tools of a chat."""
    return tools(value, lambda item: item.get("function"), {"type", "function"})


def tools(value: object, function: Any, fields: set[str], kind: str = "function") -> tuple[Tool, ...]:
    """Returns the tools of a list. `function` gives what describes one; `fields`: those of an item; `kind`:
    how its type is called."""
    if not isinstance(value, list):
        raise refused(f"must be an array, not {json_type(value)}")
    if len(value) > MAX_TOOLS:
        raise refused(f"must be at most {MAX_TOOLS} tools, not {len(value)}")
    sized(value, MAX_TOOLS_BYTES)
    found: dict[str, Tool] = {}
    for index, item in enumerate(value):
        if not isinstance(item, dict) or item.get("type", kind) != kind:
            found_kind = item.get("type") if isinstance(item, dict) else item
            raise refused(f'must be of type "{kind}"; tool {index} is {shown(found_kind)}')
        for name in item.keys() - fields:
            if item[name] is not None:
                raise refused(f"has the field {shown(name)} in tool {index}, which is not supported")
        tool = described(index, function(item))
        if found.setdefault(tool.name, tool) is not tool:
            raise refused(f"must have different names; two are {shown(tool.name)}")
    return tuple(found.values())


def described(index: int, function: object) -> Tool:
    """Returns the tool that this describes."""
    if not isinstance(function, dict):
        raise refused(f"must have a function in each; that of tool {index} is {json_type(function)}")
    for name in function.keys() - FUNCTION.keys():
        if function[name] is not None:
            raise refused(f"has the field {shown(name)} in tool {index}, which is not supported")
    name = function.get("name")
    if not isinstance(name, str) or len(name) > MAX_NAME_BYTES or not NAME.fullmatch(name):
        raise refused(
            f"must have names of 1 to {MAX_NAME_BYTES} letters, digits or any of _.:/-; that of tool {index} "
            f"is {shown(name)}"
        )
    description, parameters = function.get("description"), function.get("parameters")
    if description is not None:
        checked_text(description, MAX_DESCRIPTION_BYTES)
    if parameters is not None:
        if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
            raise refused(f"must each have a JSON schema of an object, if any; that of tool {index} is none")
        sized(parameters, MAX_SCHEMA_BYTES)
    strict = function.get("strict")
    if not (strict is None or isinstance(strict, bool)):
        raise refused(f"must have true or false as strict; tool {index} has not")
    return Tool(name, description, parameters or None, strict is True)


def chat_choice(value: object) -> ToolChoice:
    """Returns what a chat's field asks for."""
    if isinstance(value, str) and value in KINDS:
        return ToolChoice(value)
    if isinstance(value, dict) and value.get("type") == "function":
        return named(value.get("function"))
    raise refused(
        "must be auto, none, required or a function's name as OpenAI has it: " + json.dumps(_EXAMPLE)
    )


_EXAMPLE = {"type": "function", "function": {"name": "..."}}


ChatTools = Annotated[tuple[Tool, ...], PlainValidator(chat_tools), WithJsonSchema(CHAT_TOOLS)]
ChatChoice = Annotated[ToolChoice, PlainValidator(chat_choice), WithJsonSchema(CHAT_CHOICE)]


def named(function: object) -> ToolChoice:
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise refused("must have the name of a function")
    return ToolChoice("named", checked_text(function["name"], MAX_NAME_BYTES))


def check_choice(tools: Sequence[Tool], choice: ToolChoice) -> None:
    """Raises InvalidRequest if the tool that must be called is not there."""
    if choice.forced and not tools:
        raise InvalidRequest("tool_choice needs tools", field="tool_choice")
    if choice.kind == "named" and choice.name not in {tool.name for tool in tools}:
        raise InvalidRequest(
            f"tool_choice names {shown(choice.name)}, which is none of the tools", field="tool_choice"
        )


def calling_grammar(
    tools: Sequence[Tool],
    choice: ToolChoice,
    several: bool,
    structure: Structure | None,
    form: ToolFormat,
    model: ServedModel,
    built: Tokenizer,
) -> str:
    """Returns the grammar of a text that calls tools as it must, or may beside what `structure` asks for;
    empty = any text. Raises InvalidRequest that names the part at fault. Takes its time: not for an event
    loop."""
    free = not choice.forced and structure is None
    if free and not any(tool.strict for tool in tools):
        return ""
    meant = [(index, tool) for index, tool in enumerate(tools) if choice.name in ("", tool.name)]
    options = [(tool.name, ANY_ARGUMENTS if free and not tool.strict else tool.schema) for _, tool in meant]
    beside = None if choice.forced else structure
    name = "@content" if beside else ""
    text = grammar(form, options, built.token_id, several=several, beside=name, free=free)
    if len(text) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"tools: may have {MAX_GRAMMAR_BYTES} bytes as a grammar, and those that may be called have "
            "more: send fewer or simpler ones",
            field="tools",
        )
    if beside is not None:
        beside_text = compiled(beside, model)
        own = (
            json.loads(beside_text)["grammars"][0]
            if beside_text.startswith("{")
            else {"lark_grammar": beside_text}
        )
        both = [{"name": "calls", "lark_grammar": text}, {**own, "name": "content"}]
        text = json.dumps({"grammars": both})
    parts = {f"tools[{index}].function.parameters": tool.schema for index, tool in meant}
    return compiled(Structure("tools", "calls", {"text": text, "parts": parts}), model)
