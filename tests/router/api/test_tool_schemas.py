"""Schemas of tools that are called by tags, made up to cost much."""

from __future__ import annotations

import json
import tracemalloc
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.errors import InvalidRequest
from outrider.grammar import MAX_GRAMMAR_BYTES
from router import tool_formats, xml_calls
from router.api.grammar_process import process_of
from router.tool_formats import FORMATS
from tests.router.api.test_structured import load, obeys
from tests.router.api.test_tools import MODEL, TOKENIZER, asked, grammar, written


def test_alternatives_that_name_one_another_are_looked_at_so_often_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A schema of 1,600 bytes kept a thread for ever, and two such requests all that came later."""
    looked, resolved = 0, xml_calls._resolved

    def counted(*given: Any) -> Any:
        nonlocal looked
        looked += 1
        assert looked < 100
        return resolved(*given)

    monkeypatch.setattr(xml_calls, "_resolved", counted)
    alike = {"anyOf": [{"$ref": "#/$defs/a"}] * 60, "items": {}}
    parameters = {"type": "object", "$defs": {"a": alike}, "properties": {"p": {"$ref": "#/$defs/a"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    reading = asked("qwen3_coder", tools=tools).calls
    assert reading is not None and reading.json_parameters == {"f": ("p",)}


def test_of_many_alternatives_no_more_are_taken_than_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands that each parameter names had all been taken each time: 256 KB of tools took 4.5 seconds."""
    taken = 0

    class Counted(deque[Any]):
        def __iadd__(self, more: Any) -> Counted:
            nonlocal taken
            taken += len(more)
            return super().__iadd__(more)

    monkeypatch.setattr(xml_calls, "deque", Counted)
    many = {"anyOf": [{"$ref": "#/$defs/a"}] * xml_calls.MOST_LOOKED_AT + [{"items": {}}] * 10_000}
    assert not xml_calls.is_text({"$ref": "#/$defs/a"}, {"$defs": {"a": many}})
    assert 0 < taken <= xml_calls.MOST_LOOKED_AT**2


def test_of_many_values_a_few_are_looked_at_for_each_parameter() -> None:
    """Fifteen alternatives of each parameter named the same 3,900: a tool of 16 KB took .37 seconds."""
    looked = 0

    class Counted(list[int]):
        def __iter__(self) -> Iterator[int]:
            for one in super().__iter__():
                nonlocal looked
                looked += 1
                yield one

        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            return Counted(found) if isinstance(index, slice) else found

    definitions = {"a": {"enum": Counted(range(4000))}, "b": {"anyOf": [{"$ref": "#/$defs/a"}] * 15}}
    assert not xml_calls.is_text({"$ref": "#/$defs/b"}, {"$defs": definitions})
    assert 0 < looked <= xml_calls.MOST_LOOKED_AT**2


def test_the_rules_of_one_tool_are_made_no_further_than_they_may_be_long() -> None:
    parameters = {
        "$defs": {"a": {"enum": ["word"] * 2000}},
        "properties": {f"p{index}": {"$ref": "#/$defs/a"} for index in range(150)},
    }
    assert MAX_GRAMMAR_BYTES < sum(map(len, xml_calls.function(0, "f", parameters))) < 2 * MAX_GRAMMAR_BYTES


def test_a_grammar_of_tools_is_made_no_further_than_it_may_be_long() -> None:
    """Each parameter has all definitions with it: of 230 KB it came to 45 MB, which were kept as well."""
    parameters = {
        "type": "object",
        "$defs": {f"d{index}": {"items": {"const": index}} for index in range(150)},
        "properties": {f"p{index}": {"items": {}} for index in range(350)},
    }
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": parameters}} for n in range(15)]
    process = process_of(MODEL.tokenizer.json, tuple(sorted(MODEL.eos_token_ids)), MODEL.vocab_size)
    kept = process._answered.cache_info().currsize
    with pytest.raises(InvalidRequest, match="may have 32768 bytes as a grammar"):
        grammar("qwen3_coder", tools=tools, tool_choice="required")
    assert process._answered.cache_info().currsize == kept
    text = tool_formats.grammar(
        FORMATS["qwen3_coder"], [(f"f{n}", parameters) for n in range(15)], lambda _: None, several=True
    )
    assert len(text) < 2**22


def values(parameter: Any, **more: Any) -> str:
    """The rules of a call with that one parameter."""
    schema = {"type": "object", "properties": {"p": parameter}, "required": ["p"], **more}
    return "\n".join(xml_calls.function(0, "f", schema))


ENUM = {"$defs": {"E": {"type": "string", "enum": ["asc", "desc"]}}}


@pytest.mark.parametrize(
    "parameter",
    [
        {"anyOf": [{"enum": ["asc", "desc"]}, {"type": "null"}]},
        {"anyOf": [{"$ref": "#/$defs/E"}, {"type": "null"}]},
        {"allOf": [{"$ref": "#/$defs/E"}], "default": "asc"},
        {"allOf": [{"type": "string"}, {"enum": ["asc", "desc"]}]},
        {"oneOf": [{"const": "asc"}, {"const": "desc"}]},
    ],
)
def test_the_choices_of_a_text_are_held_wherever_its_schema_has_them(parameter: Any) -> None:
    rules = values(parameter, **ENUM)
    assert '("asc" | "desc")' in rules and "/(.|" not in rules


def test_the_lengths_of_alternatives_are_held() -> None:
    rules = values({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}, {"const": "all"}]})
    assert '("all")' in rules and "{0,3}" in rules and "{0,}" not in rules


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"x": {"type": "integer"}}, "required": ["x"]}}},
        {"anyOf": [{"properties": {"x": {"type": "integer"}}, "required": ["x"]}, {"properties": {"y": {}}}]},
        {"allOf": [{"properties": {"x": {"type": "integer"}}}, {"required": ["x"]}]},
    ],
)
def test_the_parameters_are_found_wherever_a_schema_has_them(schema: dict[str, Any]) -> None:
    call, *rules = xml_calls.function(0, "f", schema)
    assert call.endswith(' parameter_0_0 "</function>"') and "<parameter=x>" in rules[0]
    assert "x" in xml_calls.json_parameters(schema)


def test_a_reference_is_followed_wherever_it_points() -> None:
    inner = {"type": "object", "properties": {"x": {"type": "boolean"}}}
    known = {"p": inner, "a": {"$ref": "#/properties/p/properties/x"}, "b": {"$ref": "#/$defs/x~1y"}}
    schema = {"properties": known, "$defs": {"x/y": {"type": "integer"}}}
    assert xml_calls.json_parameters(schema) == ("p", "a", "b")


def test_a_reference_within_a_parameter_that_is_json_is_followed_too() -> None:
    inner = {"type": "object", "properties": {"x": {"type": "boolean"}}}
    known = {"p": inner, "q": {"type": "array", "items": {"$ref": "#/properties/p/properties/x"}}}
    for one in (known, {"q": {"$ref": "#/$defs/Q"}, "p": inner}, {"q": {"items": {"$ref": "#"}}}):
        schema = {"type": "object", "properties": one, "$defs": {"Q": known["q"]}, "required": ["q"]}
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        assert grammar("qwen3_coder", tools=tools, tool_choice="required")


def test_what_has_no_value_is_left_out_or_refused() -> None:
    call, *_ = xml_calls.function(0, "f", {"properties": {"a": False, "b": {"enum": ["</parameter>"]}}})
    assert "parameter" not in call
    with pytest.raises(InvalidRequest, match="'a' of f is needed"):
        xml_calls.function(0, "f", {"properties": {"a": False}, "required": ["a"]})


def test_a_length_may_be_written_as_a_fraction() -> None:
    whole = values({"type": "string", "minLength": 3, "maxLength": 4})
    assert (
        values({"type": "string", "minLength": 3.0, "maxLength": 4.0}) == whole != values({"type": "string"})
    )


def test_a_long_reference_takes_no_more_memory_than_it_has() -> None:
    long = "#" + "/p" * 200_000
    schema = {"properties": {"p": {"$ref": long}}, "required": ["p"]}
    tracemalloc.start()
    try:
        assert xml_calls.json_parameters(schema) == ("p",), "nothing says that it is a text"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(long)


def test_what_must_be_there_is_there_though_nothing_else_is_said_of_it() -> None:
    call, *_ = xml_calls.function(0, "f", {"properties": {}, "required": ["p"]})
    assert "parameter_0_0 " in call


@pytest.mark.parametrize("name", ["a>b", " a", "a ", "", "a\nb", "a" * 1001])
def test_a_name_that_would_be_read_as_another_is_left_out_or_refused(name: str) -> None:
    call, *_ = xml_calls.function(0, "f", {"properties": {name: {}, "b": {}}})
    assert "parameter_0_1?" in call and "parameter_0_0" not in call
    assert xml_calls.NAME.fullmatch("a" * 1000)
    with pytest.raises(InvalidRequest, match="is needed, and its name cannot stand in a tag"):
        xml_calls.function(0, "f", {"properties": {name: {}}, "required": [name]})


def test_a_choice_that_would_end_too_soon_is_left_out_and_refused_if_it_is_the_only_one() -> None:
    assert '("b")' in values({"enum": ["a</parameter>", "b"]})
    with pytest.raises(InvalidRequest, match="none of its values can stand before"):
        values({"const": "a</parameter>"})


def test_blanks_of_parameters_that_are_json_are_bounded() -> None:
    """A model had written 565 line ends in an array, and would have gone on to the end of the context."""
    assert "whitespace_pattern" in values({"type": "array", "items": {"type": "number"}})


def test_each_of_many_constants_is_a_choice() -> None:
    names = [f"c{number}" for number in range(xml_calls.MOST_LOOKED_AT - 1)]
    rules = values({"oneOf": [{"const": name} for name in names]})
    assert " | ".join(f'"{name}"' for name in names) in rules


def test_parameters_come_in_the_schemas_order_and_those_of_its_parts_behind() -> None:
    schema = {
        "properties": {"b": {}, "a": {}},
        "allOf": [{"properties": {"c": {}, "a": {"type": "integer"}}}],
    }
    known, _ = xml_calls._parameters(schema)
    assert list(known) == ["b", "a", "c"] and known["a"] == {}


def test_references_are_followed_one_behind_another_and_into_lists() -> None:
    definitions = {"A": {"$ref": "#/$defs/B%20C"}, "B C": {"type": "integer"}, "E": {"enum": ["x"]}}
    known = {
        "a": {"$ref": "#/$defs/A"},
        "b": {"$ref": "#/properties/c/anyOf/1"},
        "c": {"anyOf": [{"type": "string"}, {"type": "boolean"}]},
        "d": {"$ref": "#/$defs/E", "description": "with a word beside it"},
        "e": {"$ref": "#/nowhere"},
    }
    schema = {"properties": known, "$defs": definitions}
    assert xml_calls.json_parameters(schema) == ("a", "b", "e")
    assert '("x")' in "".join(xml_calls.function(0, "f", schema))


def test_what_a_reference_names_is_not_gone_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 180 parameters had copied it up to 16 times: a tool of 13 KB took .8 seconds."""

    class Whole(dict[str, Any]):
        def __iter__(self) -> Iterator[str]:
            pytest.fail("its fields are gone through")

        items = keys = values = __iter__  # type: ignore[assignment]

    named, looked = xml_calls._named, 0

    def counted(*given: Any) -> Any:
        nonlocal looked
        looked += 1
        return named(*given)

    monkeypatch.setattr(xml_calls, "_named", counted)
    root = {
        "$defs": {"A": Whole({"$ref": "#/$defs/B", "x": 0}), "B": Whole({"$ref": "#/$defs/A", "enum": [1]})}
    }
    found = xml_calls._resolved({"$ref": "#/$defs/A", "minLength": 3}, root)
    assert found["minLength"] == 3 and looked == xml_calls.MOST_REFERENCES


@pytest.mark.parametrize("beside", ["anyOf", "oneOf"])
def test_alternatives_of_a_text_are_held_whatever_is_said_beside_them(beside: str) -> None:
    rules = values({"type": "string", "maxLength": 3, beside: [{"const": "asc"}, {"const": "longer"}]})
    assert '("asc")' in rules and "(.|" not in rules


def test_a_choice_is_of_the_length_that_is_asked_for() -> None:
    assert '("xyz")' in values({"enum": ["x", "xyz"], "minLength": 2})


def test_of_two_schemas_of_a_parameter_both_sides_take_the_same() -> None:
    nested = {"allOf": [{"properties": {"y": {"type": "integer"}}, "required": ["y"]}]}
    schema = {"anyOf": [nested, {"properties": {"y": {"type": "string"}, "z": {}}}]}
    assert xml_calls.json_parameters(schema) == ("y",)
    assert "%json" in "".join(xml_calls.function(0, "f", schema))


LENGTHS = [
    (0, 40),
    (0, 20_000),
    (1, None),
    (1, 300),
    (2, 4),
    (32, 300),
    (33, 300),
    (200, None),
    (200, 20_000),
]


@pytest.mark.parametrize(("least", "most"), LENGTHS)
def test_a_text_is_as_long_as_it_may_be_and_a_short_one_exceeds_no_limit(
    least: int, most: int | None
) -> None:
    """What counts met what must not be in one automaton: a text of 5 characters, where 40 may be, ended with
    an error as soon as its end was written."""
    text = {"type": "string", "minLength": least, **({} if most is None else {"maxLength": most})}
    parameters = {"type": "object", "properties": {"a": text}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    must = grammar("qwen3_coder", tools=tools, tool_choice="required")

    def fits(told: str) -> bool:
        return obeys(must, written(FORMATS["qwen3_coder"], ("f", json.dumps({"a": told}))), TOKENIZER, MODEL)

    def goes_on(told: str) -> bool:
        """Returns whether something may come at each of its places, up to one that does not fit."""
        text = written(FORMATS["qwen3_coder"], ("f", json.dumps({"a": told}))).partition("</par")[0]
        matcher = load(MODEL.tokenizer.json, tuple(MODEL.eos_token_ids))._compile(must)
        ids = TOKENIZER.encode(f"{text}</parameter", add_special_tokens=False).ids
        while ids and matcher.mask() is not None and matcher.take(ids[:1]):
            del ids[0]
        return matcher.mask() is not None

    assert fits("x" * max(least, 3)) and goes_on("x" * max(least, 3))
    assert goes_on("x" * (least - 1))
    if least < 2:
        assert fits("a line\n and </more \n")
    assert not fits("y" * (least - 1)) or not least
    if most is not None and most < 1000:
        assert fits("z" * most) and not fits("z" * (most + 1))
    for early in ("</parameter>", "x</parameter>y", "x\n</parameter>\ny"):
        assert not fits(early + "x" * least)
