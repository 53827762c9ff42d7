"""How models write calls of tools, and which way a chat template asks for. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way. A call is a JSON object with a name and its arguments; calls may stand in an array."""

    name: str
    opening: str = ""  # what a call, or the first of several, stands after; empty = nothing
    closing: str = ""  # what follows it
    bare: bool = False  # a text that begins with a call needs no opening
    before: str = ""  # the first call, as models write it
    between: str = ""
    after: str = ""
    arguments: str = "arguments"  # what the object calls them
    id_digits: int = 24

    @property
    def markers(self) -> tuple[str, ...]:
        """Returns what tells calls from text."""
        return tuple(marker for marker in (self.opening, self.closing) if marker)

    def call_id(self, digits: str) -> str:
        """Returns the id of a call, made of hexadecimal digits."""
        return digits[: self.id_digits] if self.id_digits < 24 else f"call_{digits[: self.id_digits]}"


HERMES = ToolFormat(
    "hermes",
    opening="<tool_call>",
    closing="</tool_call>",
    before="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    after="\n</tool_call>",
)
LLAMA3 = ToolFormat("llama3_json", opening="<|python_tag|>", bare=True, between="; ", arguments="parameters")
MISTRAL = ToolFormat(  # its template takes ids of nine digits, and no others
    "mistral", opening="[TOOL_CALLS]", before="[TOOL_CALLS][", between=", ", after="]", id_digits=9
)
JSON = ToolFormat("json", bare=True, before="[", between=", ", after="]")

FORMATS: Mapping[str, ToolFormat] = {each.name: each for each in (HERMES, LLAMA3, MISTRAL, JSON)}
OF_TEMPLATE = "auto"  # the format is the chat template's
NO_JSON = "<function="  # so the template of a model begins that writes calls as XML
LLAMA_SAYS = '"parameters": dictionary'  # so Llama 3.2's template describes a call


def of_template(template: str) -> ToolFormat:
    """Returns the format in which a model calls tools whose chat template this is; JSON if it says none, or
    one that is none of these."""
    for one in (HERMES, MISTRAL, LLAMA3):
        if one.opening in template and NO_JSON not in template:
            return one
    return LLAMA3 if LLAMA_SAYS in template else JSON


Tools = Sequence[tuple[str, Mapping[str, object]]]
"""Names, and the JSON schemas of the arguments."""


def grammar(
    form: ToolFormat, tools: Tools, token_id: Callable[[str], int | None], *, several: bool, beside: str = ""
) -> str:
    """Returns, in Lark's notation, the texts that call one of the tools, or if `several` any number of them.

    `token_id`: of a marker that is one token: only that token stands for it. `beside`: a rule for texts that
    call none."""

    def written(text: str) -> str:
        for marker in form.markers:
            id = token_id(marker)
            if id is not None and marker in text:
                head, _, tail = text.partition(marker)
                return " ".join(part for part in (written(head), f"<[{id}]>", written(tail)) if part)
        return json.dumps(text) if text else ""

    more = f" ({written(form.between)} call)*" if several else ""
    options = " | ".join(f"call_{index}" for index in range(len(tools)))
    head = form.opening if beside and form.bare else ""  # text and calls must not begin alike
    lines = [
        f"start: {f'calls | {beside}' if beside else 'calls'}",
        f"calls: {written(head + form.before)} call{more} {written(form.after)}",
        f"call: {options}",
    ]
    for index, (name, schema) in enumerate(tools):
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{form.arguments}": '
        lines.append(f'call_{index}: {json.dumps(head)} arguments_{index} "}}"')
        lines.append(f"arguments_{index}: %json {json.dumps(schema)}")
    return "\n".join(lines) + "\n"
