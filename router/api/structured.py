"""Structured output: what a text is to be like, as one grammar that is checked before a token runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.errors import InvalidRequest
from outrider.grammar import MAX_GRAMMAR_BYTES
from router import tokenizer
from router.api.access import owner
from router.api.body import decoded
from router.api.fields import checked_text, json_type, refused, shown, sized
from router.api.grammar_process import process_of
from router.api.grammar_text import Structure, trigger_of
from router.requests import ServedModel

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
NEUTRAL = ("disable_any_whitespace", "disable_fallback", "disable_additional_properties")  # as false
MAX_TAGS = 128
ANY_OBJECT = {"type": "object"}
MAX_SCHEMA_BYTES = MAX_GRAMMAR_BYTES // 2  # as JSON; of choices, too
MAX_NAME_BYTES, MAX_DESCRIPTION_BYTES = 1024, 32 * 1024  # of a schema; they change nothing

TAG_FIELDS = ("begin", "schema", "end")
SCHEMA = {"type": "object", "maxProperties": MAX_SCHEMA_BYTES // 8, "description": "A JSON schema."}
_GRAMMAR = {"type": "string", "maxLength": MAX_GRAMMAR_BYTES}
_MARKER = {"type": "string", "maxLength": MAX_NAME_BYTES}
_TAGS = {
    "structures": {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_TAGS,
        "items": {
            "type": "object",
            "required": list(TAG_FIELDS),
            "properties": {"begin": {**_MARKER, "minLength": 1}, "schema": SCHEMA, "end": _MARKER},
        },
    },
    "triggers": {"type": "array", "minItems": 1, "maxItems": MAX_TAGS, "items": {**_MARKER, "minLength": 1}},
}
RESPONSE_FORMAT = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]},
        **_TAGS,
        "json_schema": {
            "type": "object",
            "required": ["schema"],
            "properties": {
                "name": {"type": "string", "maxLength": MAX_NAME_BYTES},
                "description": {"type": "string", "maxLength": MAX_DESCRIPTION_BYTES},
                "schema": SCHEMA,
                "strict": {"type": "boolean"},
            },
        },
    },
}
STRUCTURED_OUTPUTS = {
    "anyOf": [
        {"type": "object", "properties": {name: value}, "required": [name]}
        for name, value in {
            "json": {"anyOf": [SCHEMA, {"type": "string", "maxLength": MAX_GRAMMAR_BYTES}]},
            "regex": _GRAMMAR,
            "choice": {
                "type": "array",
                "items": {"type": "string", "maxLength": MAX_SCHEMA_BYTES},
                "minItems": 1,
                "maxItems": MAX_SCHEMA_BYTES // 4,
            },
            "grammar": _GRAMMAR,
            "json_object": {"const": True},
            "structural_tag": {
                "anyOf": [
                    {"type": "object", "required": list(_TAGS), "properties": _TAGS},
                    {"type": "string", "maxLength": MAX_GRAMMAR_BYTES},
                ]
            },
        }.items()
    ]
}


def response_format(value: object) -> Structure | None:
    """Returns what OpenAI's field asks for; None = any text."""
    if not isinstance(value, dict):
        raise refused(f"must be an object, not {json_type(value)}")
    match value.get("type"):
        case "text":
            _known(value, {"type"})
            return None
        case "json_object":
            _known(value, {"type"})
            return Structure("response_format", "json", ANY_OBJECT)
        case "json_schema":
            _known(value, {"type", "json_schema"})
            told = value.get("json_schema")
            if not isinstance(told, dict) or not isinstance(told.get("schema"), dict | bool):
                raise refused("of type json_schema must have a schema at json_schema.schema")
            _known(told, {"name", "description", "schema", "strict"})
            for about, most in (("name", MAX_NAME_BYTES), ("description", MAX_DESCRIPTION_BYTES)):
                if told.get(about) is not None:
                    checked_text(told[about], most)
            return Structure(
                "response_format.json_schema.schema", "json", sized(told["schema"], MAX_SCHEMA_BYTES)
            )
        case "structural_tag":
            return Structure("response_format", "structural_tag", _tags(value))
    raise refused(
        f"must be of type text, json_object, json_schema or structural_tag, not {shown(value.get('type'))}"
    )


def structured_outputs(value: object) -> Structure | None:
    """Returns what vLLM's field asks for."""
    if not isinstance(value, dict):
        raise refused(f"must be an object, not {json_type(value)}")
    _known(
        {name: told for name, told in value.items() if told is not False or name not in NEUTRAL}, set(KINDS)
    )
    given = [kind for kind in KINDS if value.get(kind) is not None]
    if len(given) != 1:
        raise refused(f"must have exactly one of {', '.join(KINDS)}, not {len(given)} of them")
    (kind,) = given
    what, field = value[kind], f"structured_outputs.{kind}"
    match kind:
        case "json_object":
            if what is not True:
                raise refused("must have true as json_object")
            return Structure(field, "json", ANY_OBJECT)
        case "json":
            return Structure(field, kind, sized(_schema(what), MAX_SCHEMA_BYTES))
        case "structural_tag":
            return Structure(field, kind, _tags(_schema(what)))
        case "choice":
            if not isinstance(what, list) or not what or not all(isinstance(one, str) for one in what):
                raise refused("must have a list of texts as choice")
            return Structure(field, kind, [checked_text(one) for one in sized(what, MAX_SCHEMA_BYTES)])
    return Structure(field, kind, checked_text(what, MAX_GRAMMAR_BYTES))


def _tags(value: object) -> Mapping[str, Any]:
    """Returns structures and triggers: where a trigger comes, one of the structures begins."""
    if not isinstance(value, dict):
        raise refused("must have an object as structural_tag")
    _known(value, {"type", *_TAGS})
    structures, triggers = value.get("structures"), value.get("triggers")
    if not isinstance(structures, list) or not 1 <= len(structures) <= MAX_TAGS:
        raise refused(f"must have from 1 to {MAX_TAGS} structures")
    if not isinstance(triggers, list) or not 1 <= len(triggers) <= MAX_TAGS:
        raise refused(f"must have from 1 to {MAX_TAGS} triggers")
    begins = {checked_text(trigger, MAX_NAME_BYTES) for trigger in triggers} - {""}
    for index, tag in enumerate(structures):
        if not isinstance(tag, dict) or not isinstance(tag.get("schema"), dict):
            raise refused(f"must have begin, schema and end in each structure; structure {index} has not")
        _known(tag, set(TAG_FIELDS))
        begin = checked_text(tag.get("begin"), MAX_NAME_BYTES)
        checked_text(tag.get("end"), MAX_NAME_BYTES)
        if not any(begin.startswith(trigger) for trigger in begins):
            raise refused(f"must have a trigger with which structure {index} begins")
    sized(value, MAX_SCHEMA_BYTES)
    return {"structures": structures, "triggers": sorted(begins)}


def _schema(value: object) -> object:
    schema = value
    if isinstance(value, str):
        text = checked_text(value, MAX_GRAMMAR_BYTES)
        try:
            schema = decoded(text.encode())
        except InvalidRequest:
            schema = None
    if not isinstance(schema, dict | bool):
        raise refused("must have a JSON schema as json, an object or its text")
    return schema


def _known(value: dict[str, Any], names: set[str]) -> None:
    for name in value.keys() - names:
        if value[name] is not None:
            raise refused(f"has the field {shown(name)}, which is unknown or not supported")


def compiled(structure: Structure | None, model: ServedModel) -> str:
    """Returns the grammar that a session is given; empty = none. Raises InvalidRequest that names the part at
    fault. Takes its time: not for an event loop."""
    if structure is None:
        return ""
    if not model.eos_token_ids:
        raise InvalidRequest(
            f"{structure.field} needs a model with an end-of-text token", field=structure.field
        )
    special = False
    if structure.kind == "structural_tag":  # a trigger that is one token comes as that token alone
        built = tokenizer.load(model.tokenizer)
        special = all(
            built.token_id(trigger_of(structure.value, tag)) is not None
            for tag in structure.value["structures"]
        )
    process = process_of(model.tokenizer.json, tuple(sorted(model.eos_token_ids)), model.vocab_size)
    told = process.compiled([structure.field, structure.kind, structure.value, special], owner())
    if "refused" in told:
        field = told.get("field", structure.field)
        reason = told["refused"] if "field" in told else f"{field}: {told['refused']}"
        raise InvalidRequest(reason, field=field)
    return told["text"]
