"""How models write calls of tools, and which way a chat template asks for. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from outrider.grammar import MAX_GRAMMAR_BYTES
from router.xml_calls import function


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way. A call is a JSON object with a name and its arguments, if `naming` or `xml` do not say
    otherwise; calls may stand in an array."""

    name: str
    opening: str = ""  # what a call, or the first of several, stands after; empty = nothing
    closing: str = ""  # what follows it
    bare: bool = False  # a text that begins with a call needs no opening
    before: str = ""  # the first call, as models write it
    between: str = ""
    after: str = ""
    arguments: str = "arguments"  # what the object calls them
    id_digits: int = 24
    naming: str = ""  # a call is a name, this, and the JSON of the arguments
    xml: bool = False  # a call is a function with its parameters, each between tags

    @property
    def markers(self) -> tuple[str, ...]:
        """Returns what tells calls from text."""
        own = (self.opening, self.closing, self.naming, CALL_ID if self.naming else "")
        return tuple(marker for marker in own if marker)

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
MISTRAL_ARGS = ToolFormat(
    "mistral_args",
    opening="[TOOL_CALLS]",
    before="[TOOL_CALLS]",
    between="[TOOL_CALLS]",
    id_digits=9,
    naming="[ARGS]",
)
QWEN3_CODER = ToolFormat(
    "qwen3_coder",
    opening="<tool_call>",
    closing="</tool_call>",
    before="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    after="\n</tool_call>",
    xml=True,
)
JSON = ToolFormat("json", bare=True, before="[", between=", ", after="]")

FORMATS: Mapping[str, ToolFormat] = {
    each.name: each for each in (HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, QWEN3_CODER, JSON)
}
OF_TEMPLATE = "auto"  # the format is the chat template's
CALL_ID = "[CALL_ID]"  # before the naming: then a model gives its calls ids, which nobody needs
XML = "<function="  # so the template of a model begins a call that writes calls as XML
LLAMA_SAYS = '"parameters": dictionary'  # so Llama 3.2's template describes a call


def of_template(template: str) -> ToolFormat:
    """Returns the format in which a model calls tools whose chat template this is; JSON if it says none, or
    one that is none of these."""
    if XML in template:
        return QWEN3_CODER if QWEN3_CODER.opening in template else JSON
    for one in (HERMES, MISTRAL_ARGS, MISTRAL, LLAMA3):
        if one.opening in template and one.naming in template:
            return one
    return LLAMA3 if LLAMA_SAYS in template else JSON


Tools = Sequence[tuple[str, Mapping[str, object]]]
"""Names, and the JSON schemas of the arguments."""
ANY_TEXT = "(.|\\n)*"
PATTERN_SIGNS = "/[](){}|.*+?^$\\"


def beginning(text: str, marker: str) -> int:
    """Returns how many characters at the end of a text may be the beginning of a marker."""
    most = min(len(marker) - 1, len(text))
    return next((count for count in range(most, 0, -1) if marker.startswith(text[-count:])), 0)


def pattern(text: str) -> str:
    """Returns the regular expression of a text."""
    return "".join("\\" * (one in PATTERN_SIGNS) + one for one in text)


def without(marker: str) -> str:
    """Returns a terminal in Lark's notation: all texts in which a marker does not come."""
    return f"/{ANY_TEXT}/ & ~/{ANY_TEXT}{pattern(marker)}{ANY_TEXT}/"


def _written(form: ToolFormat, token_id: Callable[[str], int | None], text: str) -> str:
    """Returns a text in Lark's notation, in which a marker that is one token stands for that token."""
    for marker in form.markers:
        id = token_id(marker)
        if id is not None and marker in text:
            parts = [_written(form, token_id, part) for part in text.split(marker, 1)]
            return " ".join(part for part in (parts[0], f"<[{id}]>", parts[1]) if part)
    return json.dumps(text) if text else ""


def grammar(
    form: ToolFormat,
    tools: Tools,
    token_id: Callable[[str], int | None],
    *,
    several: bool,
    beside: str = "",
    free: bool = False,
) -> str:
    """Returns, in Lark's notation, the texts that call one of the tools, or if `several` any number of them.

    `token_id`: of a marker that is one token: only that token stands for it. `beside`: a rule for texts that
    call none. `free`: any text may come before the calls, or without any."""

    written = partial(_written, form, token_id)
    more = f" ({written(form.between)} call)*" if several else ""
    options = " | ".join(f"call_{index}" for index in range(len(tools)))
    head = form.opening if beside and form.bare else ""  # text and calls must not begin alike
    start, before, lead = "calls", written(head + form.before), []
    if beside:
        start = f"calls | {beside}"
    elif free and form.bare:
        start, lead = "calls | OTHER", ["OTHER: /([ \\t\\r\\n]*[^ \\t\\r\\n\\[{](.|\\n)*)?/"]
    elif free and token_id(form.opening) is not None:
        start, lead = "TEXT calls?", [f"TEXT: {without(form.opening)}"]
    elif free:
        start, before = "TEXT | calls", f"lead {written(form.before.removeprefix(form.opening))}"
        lead = [f"TEXT: {without(form.opening)}", f"lead[lazy]: /{ANY_TEXT}{pattern(form.opening)}/"]
    lines = [
        f"start: {start}",
        *lead,
        f"calls: {before} call{more} {written(form.after)}",
        f"call: {options}",
    ]
    for index, (name, schema) in enumerate(tools):
        if sum(map(len, lines)) > MAX_GRAMMAR_BYTES:
            break  # whatever follows, it is too long
        if form.xml:
            lines += function(index, name, schema)
            continue
        if form.naming:
            lines.append(f"call_{index}: {json.dumps(name)} {written(form.naming)} arguments_{index}")
        else:
            told = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{form.arguments}": '
            lines.append(f'call_{index}: {json.dumps(told)} arguments_{index} "}}"')
        lines.append(f"arguments_{index}: %json {json.dumps(schema)}")
    return "\n".join(lines) + "\n"
