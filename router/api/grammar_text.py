"""The text of a grammar, made of what a text is to be like, and the part at fault where it cannot be.

The process of grammars makes it (`grammar_process.py`): what is asked for may keep the library busy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import llguidance

from outrider.errors import InvalidRequest
from outrider.grammar import MAX_GRAMMAR_BYTES, WHITE_SPACE, Grammars

_FORMATS: dict[str, Literal["regex", "choice", "grammar"]] = {
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
MAX_LINES = 256  # of a grammar: the library takes a second for a chain of so many rules with a mistake
MOST_TRIED = 128  # parts of a schema, to find the one at fault
DEFINITIONS = ("$defs", "definitions")
TOO_DEEP, IMPOSSIBLE = "recursion limit", "Unsatisfiable"  # what the library says


@dataclass(frozen=True, slots=True)
class Structure:
    """What a text is to be like, and the field that says so."""

    field: str
    kind: str  # one of json, regex, choice, grammar, structural_tag; ready, calls
    # A schema; a text; texts; a text; structures and triggers; the grammar itself; that, with its schemas.
    value: Any


def compiled_here(asked: tuple[str, str, Any, bool], grammars: Grammars) -> str:
    """Returns the grammar of a structure's parts, made in this process. Raises InvalidRequest as `compiled`
    does. The last part: whether all triggers are tokens."""
    *parts, special = asked
    structure = Structure(*parts)
    text, fault = _text(structure, special)
    lines = structure.value.count("\n") + 1 if structure.kind == "grammar" else 1
    fault = fault or _fault(grammars, text, lines)
    if fault is None:
        return text
    field = structure.field
    if structure.kind == "calls":
        for place, schema in structure.value["parts"].items():
            compiled_here((place, "json", schema, False), grammars)  # raises where one is at fault by itself
    if structure.kind == "json":
        place, fault = _deepest(grammars, structure.value, fault)
        field += place
    raise InvalidRequest(f"{field}: {fault}", field=field)


def _text(structure: Structure, special: bool) -> tuple[str, str | None]:
    """Returns the grammar as llguidance has it, and what is wrong with what it is made from."""
    try:
        if structure.kind in ("ready", "calls"):
            return structure.value if structure.kind == "ready" else structure.value["text"], None
        if structure.kind == "json":
            return _of_schema(structure.value), None
        if structure.kind == "structural_tag":
            return _of_tags(structure.value, special), None
        return llguidance.grammar_from(_FORMATS[structure.kind], structure.value), None
    except Exception as error:  # the library's translation from GBNF raises what comes
        return "", f"cannot be read: {error}"


def _of_tags(told: Mapping[str, Any], special: bool) -> str:
    tags = []
    for tag in told["structures"]:
        trigger = trigger_of(told, tag)
        schema = {"x-guidance": {"whitespace_pattern": WHITE_SPACE}, **tag["schema"]}
        tags.append(llguidance.StructTag(trigger=trigger, begin=tag["begin"], grammar=schema, end=tag["end"]))
    return str(llguidance.StructTag.to_grammar(tags, assume_special=special))


def trigger_of(told: Mapping[str, Any], tag: Mapping[str, Any]) -> str:
    """Returns what begins a structure."""
    return str(max((one for one in told["triggers"] if tag["begin"].startswith(one)), key=len))


def _of_schema(schema: object) -> str:
    told = {"allOf": [schema]} if isinstance(schema, bool) else schema
    return llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(told), defaults={"whitespace_pattern": WHITE_SPACE}
    )


def _fault(grammars: Grammars, text: str, lines: int = 1) -> str | None:
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        return f"may have {MAX_GRAMMAR_BYTES} bytes as a grammar, not {len(text.encode())}"
    if lines > MAX_LINES:
        return f"must have at most {MAX_LINES} lines, not {lines}"
    try:
        grammars.check(text)
    except InvalidRequest as error:
        return error.message
    return None


def _deepest(grammars: Grammars, schema: Any, fault: str) -> tuple[str, str]:
    """Returns the path of the deepest part that has the fault by itself, and what is said of that."""
    place, tried = "", 0
    if TOO_DEEP in fault:
        return place, fault
    named = {name: schema[name] for name in DEFINITIONS if isinstance(schema, dict) and name in schema}
    while True:
        for name, part in _parts(schema):
            tried += 1
            if tried > MOST_TRIED:
                return place, fault
            alone = {**named, **part} if isinstance(part, dict) else part
            found = _fault(grammars, _of_schema(alone)) or ""
            if found == fault or (found.startswith(IMPOSSIBLE) and fault.startswith(IMPOSSIBLE)):
                place, schema, fault = f"{place}.{name}", part, found
                break
        else:
            return place, fault


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yields the schemas of which a schema is made."""
    if not isinstance(schema, dict):
        return
    for keyword in ("properties", "patternProperties", *DEFINITIONS):
        if isinstance(parts := schema.get(keyword), dict):
            yield from ((f"{keyword}.{name}", part) for name, part in parts.items())
    for keyword in ("items", "additionalProperties", "not", "contains"):
        if isinstance(schema.get(keyword), dict):
            yield keyword, schema[keyword]
    for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(parts := schema.get(keyword), list):
            yield from ((f"{keyword}[{index}]", part) for index, part in enumerate(parts))
