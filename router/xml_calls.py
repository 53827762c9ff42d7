"""Calls of tools as Qwen3-Coder writes them: a function and its parameters, each between tags. Pure.

A parameter that is a text stands as it is between its tags; any other stands as JSON.
"""

from __future__ import annotations

import json
import re
from collections import ChainMap, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn
from urllib.parse import unquote

from outrider.errors import InvalidRequest
from outrider.grammar import MAX_GRAMMAR_BYTES, WHITE_SPACE

FUNCTION, PARAMETER, PARAMETER_END, FUNCTION_END = "<function=", "<parameter=", "</parameter>", "</function>"
LINE_END, END = json.dumps("\n"), json.dumps(f"\n{PARAMETER_END}")
ALTERNATIVES = ("anyOf", "oneOf", "allOf")
MOST_PARTS = 64  # of a reference: what points deeper is not found
MOST_REFERENCES = 4  # one behind another, that are followed here
MOST_LOOKED_AT = 16  # of alternatives, and of values, to find out if a parameter is a text
NO_TEXT = {"properties", "items", "$ref"}  # the last where it cannot be followed
SHARED = ("type", "minLength", "maxLength")  # what is said beside alternatives holds for each
OF_A_TEXT = ("type", "enum", "const", "minLength", "maxLength", "properties", "items", "anyOf", "oneOf")
BESIDE = (  # a reference
    *(*OF_A_TEXT, "allOf", "pattern", "format", "not", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "required"),
    *("additionalProperties", "patternProperties", "minProperties", "maxProperties"),
)
NAME = re.compile(r"[^\s>]([^\n>]{,998}[^\s>])?")  # of a parameter, as it is read from a tag
REFERENCE = re.compile(r'("\$ref": ")#(?=["/])')
ELSEWHERE = re.compile(r'"\$ref": "#("|/(?!(\$defs|definitions)/))')
BLANKS = {"x-guidance": {"whitespace_pattern": WHITE_SPACE}}
ANY = r"(.|\n)"  # a character of a text in a grammar
UNBOUNDED = 2**20  # no text is so long
EXACT = 32  # a longer shortest length is held by keeping < out of that many characters


def is_text(schema: object, root: Mapping[str, Any]) -> bool:
    """Returns whether a parameter with this schema is a text, as far as the schema says it."""
    return next(_texts(schema, root), None) is not None


def _texts(schema: object, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields what a schema says of the texts that it allows, one alternative after the other. It is a
    client's, and may be anything: of its alternatives, which may name one another, the first ones are looked
    at."""
    ahead = deque[tuple[object, dict[str, Any]]]([(schema, {})])  # with what is said beside an alternative
    for left in reversed(range(MOST_LOOKED_AT)):
        if not ahead:
            break
        one, beside = ahead.popleft()
        own = _resolved(one, root)
        own = ChainMap(own, beside) if beside else own  # type: ignore[arg-type]
        said = _says_text(own)
        if said is not False and isinstance(every := own.get("allOf"), list):
            own = _together([*(_resolved(one, root) for one in every[:MOST_LOOKED_AT]), own])
            said = _says_text(own)
        parts = next((own[name] for name in ALTERNATIVES if isinstance(own.get(name), list)), None)
        if said is not False and parts is not None and not {"enum", "const"} & own.keys():
            shared = {name: own[name] for name in SHARED if name in own}
            room = max(0, left - len(ahead))
            ahead += [(one, shared) for one in parts[:room]]
        elif said or (said is None and not NO_TEXT & own.keys()):
            yield own


def _together(parts: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns what all of these say of a text; the last one's word counts."""
    return {name: part[name] for part in parts for name in OF_A_TEXT if name in part}


def _says_text(schema: Mapping[str, Any]) -> bool | None:
    """Returns what a schema says by itself; None = nothing."""
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list):
            return any(isinstance(value, str) for value in values[:MOST_LOOKED_AT])
    kind = schema.get("type")
    return None if kind is None else kind == "string" or (isinstance(kind, list) and "string" in kind)


def _resolved(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schema that another one names, with what it says beside that. What cannot be followed is
    left as it is: the grammar follows or refuses it. It is asked often, and of schemas that are large: it
    copies nothing that grows with them."""
    if not isinstance(schema, Mapping):
        return {}
    found = schema
    for _ in range(MOST_REFERENCES):
        name = found.get("$ref")
        there = _named(name, root) if isinstance(name, str) else None
        if not isinstance(there, Mapping):
            break
        found = there
    beside = {} if found is schema else {key: schema[key] for key in BESIDE if key in schema}
    return ChainMap(beside, found) if beside else found  # type: ignore[arg-type]


def _named(reference: str, root: Mapping[str, Any]) -> object:
    """Returns what a pointer of JSON points at; None if there is none."""
    start, *parts = reference.split("/", MOST_PARTS)
    found: object = root if start == "#" else None
    for part in parts:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(key)] if key.isdecimal() and len(key) < 6 and int(key) < len(found) else None
        else:
            found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _parameters(schema: Mapping[str, Any], most: int = MOST_LOOKED_AT) -> tuple[dict[str, Any], set[str]]:
    """Returns the parameters of a function, and the names of those that it must have. `most`: of alternatives
    so many are looked at."""
    found, required = dict[str, Any](), dict[str, None]()
    ahead: deque[object] = deque([schema])
    for _ in range(MOST_LOOKED_AT):
        if not ahead:
            break
        own = _resolved(ahead.popleft(), schema)
        if isinstance(known := own.get("properties"), Mapping):
            found = {**found, **{name: one for name, one in known.items() if name not in found}}
        if isinstance(needed := own.get("required"), list):
            required |= dict.fromkeys(one for one in needed if isinstance(one, str))
        for name in ALTERNATIVES:
            if isinstance(parts := own.get(name), list):
                ahead += parts[: MOST_LOOKED_AT if name == "allOf" else most]
    other = schema.get("additionalProperties")  # what may have any name
    return {**found, **{name: other or {} for name in required if name not in found}}, set(required)


def json_parameters(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the parameters of a function that are no texts."""
    known, _ = _parameters(schema)
    meant, _ = _parameters(schema, most=1)  # where they differ, what a forced call is written by
    return tuple(name for name, one in {**known, **meant}.items() if not is_text(one, schema))


def function(index: int, name: str, schema: Mapping[str, Any]) -> list[str]:
    """Returns the rules, in Lark's notation, of a call of the function. Its parameters come in the schema's
    order; of alternatives of all of them the first one counts. Of texts the choices and the lengths are held;
    patterns are not; texts with </ within their shortest length are left out. Raises InvalidRequest where a
    parameter that it must have cannot be written so."""
    known, required = _parameters(schema, most=1)
    parts, lines, length = list[str](), list[str](), 0
    for number, (parameter, one) in enumerate(known.items()):
        if length > MAX_GRAMMAR_BYTES:
            break  # whatever follows, it is too long
        if not NAME.fullmatch(parameter):  # it would be read as another
            if parameter in required:
                _refuse(name, parameter, "its name cannot stand in a tag")
            continue
        rule = f"parameter_{index}_{number}"
        value = _value(f"{rule}_value", one, schema)
        if not value:
            if parameter in required:
                _refuse(name, parameter, f"none of its values can stand before {PARAMETER_END}")
            continue
        parts.append(rule if parameter in required else f"{rule}?")
        lines.append(f"{rule}: {json.dumps(f'{PARAMETER}{parameter}>{chr(10)}')} {rule}_value {LINE_END}")
        lines.append(value)
        length += len(lines[-2]) + len(lines[-1])
    head = json.dumps(f"{FUNCTION}{name}>\n")
    return [f"call_{index}: {head} {' '.join(parts)} {json.dumps(FUNCTION_END)}", *lines]


def _refuse(function: str, parameter: str, why: str) -> NoReturn:
    raise InvalidRequest(
        f"the parameter {parameter!r:.100} of {function} is needed, and {why}", field="tools"
    )


def _value(rule: str, schema: object, root: Mapping[str, Any]) -> str:
    """Returns the rules of a value with its end; none if there is no such value."""
    if schema is False:
        return ""
    texts = list(_texts(schema, root))
    if not texts:
        return f"{rule}: {rule}_json {END}\n{rule}_json: %json {_json(_resolved(schema, root), root)}"
    # What is there twice stands here twice: all that takes time makes a grammar longer, which has a limit.
    options, ways = list[str](), dict[tuple[int, int], None]()
    seen = dict[tuple[int, int, int], object]()
    for own in texts:
        least, most = _length(own.get("minLength"), 0), _length(own.get("maxLength"), UNBOUNDED)
        choices = [own["const"]] if "const" in own else own.get("enum")
        if isinstance(choices, list):
            if (id(choices), least, most) not in seen:  # several alternatives may name one
                sound = (one for one in choices if isinstance(one, str) and PARAMETER_END not in one)
                options += (json.dumps(one) for one in sound if least <= len(one) <= most)
            seen[id(choices), least, most] = choices
        elif least <= most:
            ways[least, most] = None
    names = [f"{rule}_{place}" for place in range(len(ways))]
    lines = [_of_length(name, *way) for name, way in zip(names, ways, strict=True)]
    names += [f"({' | '.join(options)}) {END}"] * bool(options)
    return "\n".join([f"{rule}: {' | '.join(names)}", *lines]) if names else ""


def _of_length(rule: str, least: int, most: int) -> str:
    """Returns the rules of a text of so many characters with its end, the first that comes.

    All that counts up to `most` is apart from what must not be within `least`: in one automaton their states
    would multiply, and exceed what a lexer may have."""

    def tail(taken: int) -> str:
        many = "*" if most == UNBOUNDED else f"{{0,{most - taken}}}"
        return rf"{ANY}{many}\n?<\/parameter>"

    if not least:
        return f"{rule}[lazy]: /{tail(0)}/"
    if least > EXACT:
        return rf"{rule}[lazy]: /[^<]{{{least - 1}}}[^<\n]{tail(least)}/"
    # A character more where the last of these begins what is no end.
    ways = [(r"[^<\n]", least), (r"<[^\/<\n]", least + 1)][: 1 + (most > least)]
    lines = [f"{rule}: {' | '.join(f'{rule}_{taken}' for _, taken in ways)}"]
    for last, taken in ways:
        head = f"{rule}_{taken}".upper()
        lines.append(rf"{head}: /{ANY}{{{least - 1}}}{last}/ & ~/{ANY}*<\/{ANY}*/")
        lines.append(f"{rule}_{taken}[lazy]: {head} /{tail(taken)}/")
    return "\n".join(lines)


def _json(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """Returns a schema that stands by itself, with what it refers to in the one that it stood in."""
    named = {name: root[name] for name in ("$defs", "definitions") if name in root}
    told = json.dumps({**BLANKS, **schema, **named})
    if not ELSEWHERE.search(told):
        return told
    return REFERENCE.sub(r"\1#/$defs/all", json.dumps({**BLANKS, **schema, "$defs": {"all": root}}))


def _length(told: object, otherwise: int) -> int:
    whole = isinstance(told, int | float) and not isinstance(told, bool) and told >= 0 and told == told // 1
    return min(int(told), UNBOUNDED) if whole else otherwise  # type: ignore[call-overload]
