"""Calls of tools as Qwen3-Coder writes them: a function and its parameters, each between tags. Pure.

A parameter that is a text stands as it is between its tags; any other stands as JSON.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from typing import Any

from outrider.grammar import MAX_GRAMMAR_BYTES

FUNCTION, PARAMETER, PARAMETER_END, FUNCTION_END = "<function=", "<parameter=", "</parameter>", "</function>"
LINE_END, END = json.dumps("\n"), json.dumps(f"\n{PARAMETER_END}")
ALTERNATIVES = ("anyOf", "oneOf", "allOf")
MOST_LOOKED_AT = 16  # of them, and of values, to find out if a parameter is a text
OF_TEXT = r"/(.|\n){%s,%s}\n<\/parameter>/ & ~/(.|\n)*<\/parameter>(.|\n)+/"  # with its end, which comes once


def is_text(schema: object, root: Mapping[str, Any]) -> bool:
    """Returns whether a parameter with this schema is a text, as far as the schema says it. It is a client's,
    and may be anything: of its alternatives, which may name one another, the first ones are looked at."""
    ahead = deque([schema])
    for _ in range(MOST_LOOKED_AT):
        if not ahead:
            break
        own = _resolved(ahead.popleft(), root)
        parts = next((own[name] for name in ALTERNATIVES if isinstance(own.get(name), list)), None)
        said = _says_text(own)
        if said is None and parts is not None:
            ahead += parts[:MOST_LOOKED_AT]
        elif said or (said is None and not {"properties", "items"} & own.keys()):
            return True
    return False


def _says_text(schema: Mapping[str, Any]) -> bool | None:
    """Returns what a schema says by itself; None = nothing."""
    kind = schema.get("type")
    if kind is not None:
        return kind == "string" or (isinstance(kind, list) and "string" in kind)
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list):
            return any(isinstance(value, str) for value in values[:MOST_LOOKED_AT])
    return None


def _resolved(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schema that another one only names."""
    if isinstance(schema, Mapping) and isinstance(name := schema.get("$ref"), str):
        places, _, name = name.removeprefix("#/").rpartition("/")
        found = root.get(places)
        schema = found.get(name) if isinstance(found, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def _parameters(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    known = schema.get("properties")
    return known if isinstance(known, Mapping) else {}


def json_parameters(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the parameters of a function that are no texts."""
    return tuple(name for name, one in _parameters(schema).items() if not is_text(one, schema))


def function(index: int, name: str, schema: Mapping[str, Any]) -> list[str]:
    """Returns the rules, in Lark's notation, of a call of the function. Its parameters come in the schema's
    order. Of texts the choices and the lengths are held; patterns are not."""
    required = schema.get("required")
    parts, lines, length = list[str](), list[str](), 0
    for number, (parameter, one) in enumerate(_parameters(schema).items()):
        if length > MAX_GRAMMAR_BYTES:
            break  # whatever follows, it is too long
        rule = f"parameter_{index}_{number}"
        needed = isinstance(required, list) and parameter in required
        parts.append(rule if needed else f"{rule}?")
        lines.append(f"{rule}: {json.dumps(f'{PARAMETER}{parameter}>{chr(10)}')} {rule}_value {LINE_END}")
        lines.append(_value(f"{rule}_value", one, schema))
        length += len(lines[-2]) + len(lines[-1])
    head = json.dumps(f"{FUNCTION}{name}>\n")
    return [f"call_{index}: {head} {' '.join(parts)} {json.dumps(FUNCTION_END)}", *lines]


def _value(rule: str, schema: object, root: Mapping[str, Any]) -> str:
    own = _resolved(schema, root)
    if not is_text(schema, root):
        named = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return f"{rule}: {rule}_json {END}\n{rule}_json: %json {json.dumps({**named, **own})}"
    choices = [own["const"]] if "const" in own else own.get("enum")
    if isinstance(choices, list):
        options = " | ".join(json.dumps(one) for one in choices if isinstance(one, str))
        return f"{rule}: ({options}) {END}"
    lengths = _length(own.get("minLength"), 0), _length(own.get("maxLength"), "")
    return f"{rule}: {rule.upper()}\n{rule.upper()}: {OF_TEXT % lengths}"


def _length(told: object, otherwise: object) -> object:
    return told if type(told) is int and told >= 0 else otherwise
