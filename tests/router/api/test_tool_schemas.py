"""Schemas of tools that are called by tags, made up to cost much."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.errors import InvalidRequest
from outrider.grammar import MAX_GRAMMAR_BYTES
from router import tool_formats, xml_calls
from router.api.grammar_process import process_of
from router.tool_formats import FORMATS
from tests.router.api.test_tools import MODEL, asked, grammar


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
