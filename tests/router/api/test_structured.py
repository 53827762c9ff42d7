"""Structured output at the router: what is taken becomes a session's grammar, what is not is refused in words
that name it, and nothing costs much."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from outrider.errors import InvalidRequest
from outrider.grammar import load
from outrider.v1 import generation_pb2
from router.api import generation_wire, schema
from router.api.threads import Threads
from router.api.validation import prepare, prepared_in
from router.requests import ServedModel
from tests.router.api.scripted import EOS, byte_level, sentencepiece, served

TOKENIZER = byte_level()
MODEL = served(TOKENIZER)
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


TAGS = {
    "structures": [
        {"begin": "<function=f>", "schema": OBJECT, "end": "</function>"},
        {"begin": "<function=g>", "schema": {"type": "object"}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}
TAGGED = ["the fox", 'so <function=f>{"a": 5}</function> it <function=g>{}</function> is']
NOT_TAGGED = ["<function=h>{}</function>", '<function=f>{"a": "5"}</function>', "<function=f>"]


def grammar_of(model: ServedModel = MODEL, **fields: Any) -> str:
    body = schema.parse(schema.CompletionRequest, {"prompt": "the fox", **fields})
    (session,) = prepare(body, model, lambda below: 0).sessions
    ends = session.params.stop_token_ids
    assert ends == tuple(model.eos_token_ids)
    return session.params.grammar


def obeys(grammar: str, text: str, tokenizer: Any = TOKENIZER, model: ServedModel = MODEL) -> bool:
    """Returns whether a text may be all of an answer."""
    ids = [*tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.token_to_id(EOS)]
    matcher = load(model.tokenizer.json, tuple(model.eos_token_ids))._compile(grammar)
    return matcher.fitting(ids) == len(ids)  # a place says no where that takes long


@pytest.mark.parametrize(
    ("fields", "texts", "others"),
    [
        (
            {"response_format": {"type": "json_object"}},
            ["{}", '{"b": [1, "ü"]}', '{\n  "b": {\n    "c": 1\n  }\n}'],
            ["[]", '{"b"', "a", "{\n\n}"],
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": OBJECT}}},
            ['{"a":5}', '{"a": -17}'],
            ["{}", '{"a":"5"}'],
        ),
        ({"structured_outputs": {"json": OBJECT}}, ['{"a": 5}'], ["{}"]),
        ({"structured_outputs": {"json": json.dumps(OBJECT)}}, ['{"a": 5}'], ["{}"]),
        ({"structured_outputs": {"json_object": True}}, ["{}"], ["[]"]),
        (
            {
                "structured_outputs": {
                    "json_object": True,
                    "disable_any_whitespace": False,
                    "disable_fallback": False,
                }
            },
            ["{}"],
            ["[]"],
        ),
        ({"structured_outputs": {"regex": "[ab]+c?"}}, ["aba", "ac"], ["", "c", "acc"]),
        ({"structured_outputs": {"choice": ["the fox", 'a "dog"']}}, ["the fox", 'a "dog"'], ["the", ""]),
        ({"structured_outputs": {"grammar": 'start: "a" start "b" | "c"'}}, ["c", "aacbb"], ["acbb"]),
        ({"structured_outputs": {"grammar": 'root ::= "a" root "b" | "c"'}}, ["c", "acb"], ["ac"]),
        ({"structured_outputs": {"regex": "a+"}, "ignore_eos": True}, ["aa"], ["b"]),
        ({"structured_outputs": {"structural_tag": TAGS}}, TAGGED, NOT_TAGGED),
        ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, TAGGED, NOT_TAGGED),
        ({"response_format": {"type": "structural_tag", **TAGS}}, TAGGED, NOT_TAGGED),
    ],
)
def test_a_text_obeys_what_was_asked_for(fields: dict[str, Any], texts: list[str], others: list[str]) -> None:
    grammar = grammar_of(**fields)
    assert {text: obeys(grammar, text) for text in texts + others} == {
        **dict.fromkeys(texts, True),
        **dict.fromkeys(others, False),
    }


def test_a_tokenizer_of_llama_2_s_kind() -> None:
    tokenizer = sentencepiece()
    model = served(tokenizer)
    grammar = grammar_of(model, structured_outputs={"regex": " ?the( fox)*"})
    assert obeys(grammar, "the fox fox", tokenizer, model) and not obeys(grammar, "fox", tokenizer, model)


def test_grpc_asks_for_the_same() -> None:
    Structured, Choice = generation_pb2.StructuredOutputs, generation_pb2.Choice
    for asked, fields in [
        (Structured(json=json.dumps(OBJECT)), {"json": OBJECT}),
        (Structured(regex="a+"), {"regex": "a+"}),
        (Structured(choice=Choice(texts=["a", "b"])), {"choice": ["a", "b"]}),
        (Structured(grammar='start: "a"'), {"grammar": 'start: "a"'}),
        (Structured(json_object=True), {"json_object": True}),
        (Structured(structural_tag=json.dumps(TAGS)), {"structural_tag": TAGS}),
    ]:
        request = generation_pb2.GenerateRequest(text="the fox", structured_outputs=asked)
        (session,) = prepare(
            generation_wire.body(request.SerializeToString()), MODEL, lambda below: 0
        ).sessions
        assert session.params.grammar == grammar_of(structured_outputs=fields)
    with pytest.raises(InvalidRequest, match="exactly one of json, regex"):
        empty = generation_pb2.GenerateRequest(text="a", structured_outputs=Structured())
        generation_wire.body(empty.SerializeToString())


def in_schema(asked: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": asked}}}


def tagged(**changes: Any) -> dict[str, Any]:
    return {"structured_outputs": {"structural_tag": {**TAGS, **changes}}}


DEEP: dict[str, Any] = {}
for _ in range(200):
    DEEP = {"items": DEEP}
RULES = "\n".join(["start: a0", *(f"a{number}: a{number + 1}" for number in range(2000))])
ROOT = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        (in_schema({"properties": {"a": {"uniqueItems": True}}}), f"{ROOT}.properties.a", "uniqueItems"),
        (
            in_schema({"$defs": {"x": {"items": {"not": {}}}}, "items": {"$ref": "#/$defs/x"}}),
            f"{ROOT}.$defs.x.items",
            "not",
        ),
        (in_schema({"anyOf": [{}, {"type": "date"}]}), f"{ROOT}.anyOf[1]", "date"),
        (
            in_schema(
                {"items": {"type": "integer", "minimum": 5, "maximum": 3}, "type": "array", "minItems": 1}
            ),
            f"{ROOT}.items",
            "greater than maximum",
        ),
        (in_schema(False), ROOT, "false"),
        (in_schema({"$ref": "https://example.com/schema"}), ROOT, "does not fetch"),
        (in_schema(DEEP), ROOT, "recursion limit"),
        (in_schema({"enum": ["x" * 20_000]}), "response_format", "may have 16384 bytes"),
        (in_schema(5), "response_format", "must have a schema at json_schema.schema"),
        ({"response_format": {"type": "xml"}}, "response_format", "text, json_object, json_schema or"),
        (tagged(triggers=["x"]), "structured_outputs", "a trigger with which structure 0 begins"),
        (tagged(triggers=[]), "structured_outputs", "from 1 to 128 triggers"),
        (tagged(structures=[{"begin": "a"}]), "structured_outputs", "begin, schema and end in each"),
        (tagged(format={}), "structured_outputs", "the field 'format'"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs", "an object or its text"),
        (
            tagged(structures=[{"begin": "a", "schema": {"uniqueItems": True}, "end": ""}], triggers=["a"]),
            "structured_outputs.structural_tag",
            "uniqueItems",
        ),
        ({"response_format": {"type": "json_object", "a": 1}}, "response_format", "the field 'a'"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex", "look-around"),
        ({"structured_outputs": {"regex": "(" * 9000}}, "structured_outputs.regex", "regex"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar", "nothing"),
        ({"structured_outputs": {"grammar": RULES}}, "structured_outputs.grammar", "at most 256 lines"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "a list of texts as choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "an object or its text"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "give one of them",
        ),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_its_place(
    fields: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grammar_of(**fields)
    assert (refused.value.field, words in refused.value.message) == (field, True), refused.value.message
    assert refused.value.grpc_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


def test_any_text_costs_no_grammar() -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"response_format": None}):
        assert grammar_of(**fields) == ""


BOMB = {
    "type": "string",
    "allOf": [{"pattern": f"(a|b)*{'ab'[each % 2]}(a|b){{{each}}}"} for each in range(40)],
}


def test_a_schema_that_takes_minutes_and_gigabytes_to_compile_is_refused_and_others_are_not() -> None:
    """Two thousand bytes, within all of the library's limits: each pattern more doubles what it takes."""
    for bomb in (BOMB, {"type": "object", "properties": {"a": BOMB}}):
        with pytest.raises(InvalidRequest, match="it takes too much time or memory to compile") as refused:
            grammar_of(structured_outputs={"json": bomb})
        assert refused.value.field == "structured_outputs.json"
        assert obeys(grammar_of(structured_outputs={"json": OBJECT}), '{"a": 5}')


def test_what_is_compiled_takes_no_place_of_other_requests() -> None:
    body = schema.parse(schema.CompletionRequest, {"prompt": "a", "structured_outputs": {"regex": "a"}})
    assert prepared_in(body, 10) is None
    assert prepared_in(schema.parse(schema.CompletionRequest, {"prompt": "a"}), 10) == 10
    threads = Threads()
    lanes = [threads._lane(size) for size in (10, 100_000, None)]
    assert len({id(lane._threads) for lane in lanes}) == 3
