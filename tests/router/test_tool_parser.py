"""Calls of tools in texts: each format, what is no call, and the same whatever pieces a text comes in."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.tool_formats import (
    FORMATS,
    HERMES,
    JSON,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN3_CODER,
    ToolFormat,
    of_template,
)
from router.tool_parser import MAX_HELD, CallParser
from router.xml_parser import XmlCallParser

Calls = list[tuple[str, str]]
TYPED = {"f": ["n", "l"]}  # parameters that are no texts


def parsed(form: ToolFormat, pieces: Sequence[str], several: bool = True) -> tuple[str, Calls]:
    """Returns the text and the calls, put together from what came piece by piece."""
    kind: Callable[..., CallParser] = (
        partial(XmlCallParser, json_parameters=TYPED) if form.xml else CallParser
    )
    parser = kind(form, "id {}".format, several=several)
    text, calls = "", []
    for told, deltas in [*map(parser.push, pieces), parser.flush()]:
        text += told
        for delta in deltas:
            if delta.name:
                assert (delta.index, delta.id) == (len(calls), f"id {len(calls)}")
                calls.append((delta.name, ""))
            name, arguments = calls[delta.index]
            calls[delta.index] = (name, arguments + delta.arguments)
    assert [(call.name, call.arguments) for call in parser.calls] == calls
    return text, calls


F = '{"name": "f", "arguments": {"a": [1, "}"]}}'
G = '{"name": "g", "arguments": {}}'
F_CALL, G_CALL = ("f", '{"a": [1, "}"]}'), ("g", "{}")
OF_LLAMA = '{"name": "f", "parameters": {"a": [1, "}"]}}'

QUOTED, OF_QUOTED = 'a "b"\n\n<c>\n', '{"a": "a \\"b\\"\\n\\n<c>\\n", "n": 5}'


def xml(name: str, **parameters: str) -> str:
    """As Qwen3-Coder writes a call."""
    told = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{told}</function>\n</tool_call>"


ENDS = json.dumps({"l": ["a</parameter>\\"], "n": '"</parameter>', "a": "x"})

STRAY = ("f", json.dumps({"n": '5"', "l": 1}))

CASES: list[tuple[ToolFormat, str, str, Calls]] = [
    (HERMES, f"<tool_call>\n{F}\n</tool_call>", "", [F_CALL]),
    (
        HERMES,
        f"Wait.\n\n<tool_call>{F}</tool_call>\n<tool_call>\n{G}\n</tool_call>",
        "Wait.",
        [F_CALL, G_CALL],
    ),
    (HERMES, "no <tool call", "no <tool call", []),
    (HERMES, f"{F}", f"{F}", []),
    (HERMES, "a \n", "a \n", []),
    (HERMES, "<tool_call>\nhello\n</tool_call>", "<tool_call>\nhello\n</tool_call>", []),
    (HERMES, f"x <tool_call>no <tool_call>{G}", "x <tool_call>no", [G_CALL]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1\n</tool_call>', "", [("f", '{"a": 1\n')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x', "", [("f", '{"a": "x')]),
    (HERMES, '<tool_call>{"arguments": {"a":1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\":1}"}</tool_call>', "", [("f", '{"a":1}')]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call> So.', "", [("f", "{}")]),
    (HERMES, "<tool_call>{'name': 'f'}", "<tool_call>{'name': 'f'}", []),
    (HERMES, '<tool_call>{"name": 5}', '<tool_call>{"name": 5}', []),
    (
        HERMES,
        '<tool_call>{"name": "\\q", "arguments": {}}',
        '<tool_call>{"name": "\\q", "arguments": {}}',
        [],
    ),
    (HERMES, '<tool_call>{"name": "\\ud800", "arguments": {}}', "", [("?", "{}")]),
    (HERMES, '<tool_call>{"a": {}}' + " " * 9, '<tool_call>{"a": {}}' + " " * 9, []),
    (LLAMA3, OF_LLAMA, "", [F_CALL]),
    (LLAMA3, f" <|python_tag|>{OF_LLAMA}; {OF_LLAMA}", "", [F_CALL, F_CALL]),
    (LLAMA3, '{"city": "x"} is it', '{"city": "x"} is it', []),
    (LLAMA3, 'As {"name": "f", "parameters": {}}', 'As {"name": "f", "parameters": {}}', []),
    (LLAMA3, '{"type": "function", "name": "g", "parameters": {}}', "", [G_CALL]),
    (MISTRAL, f"[TOOL_CALLS][{F}, {G}]", "", [F_CALL, G_CALL]),
    (MISTRAL, 'A[TOOL_CALLS] [{"name": "g", "arguments": {}, "id": "123456789"}]', "A", [G_CALL]),
    (MISTRAL, "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    (MISTRAL_ARGS, '[TOOL_CALLS]f[ARGS]{"a": [1, "}"]}', "", [F_CALL]),
    (
        MISTRAL_ARGS,
        f"A[TOOL_CALLS]f[CALL_ID]1a[ARGS] {F_CALL[1]}[TOOL_CALLS]g[ARGS]{{}}",
        "A",
        [F_CALL, G_CALL],
    ),
    (MISTRAL_ARGS, f"[TOOL_CALLS][{F}, {G}]", "", [F_CALL, G_CALL]),
    (MISTRAL_ARGS, "[TOOL_CALLS]no[ARG", "[TOOL_CALLS]no[ARG", []),
    (MISTRAL_ARGS, "[TOOL_CALLS]f[ARGS] none", "", [("f", "")]),
    (QWEN3_CODER, xml("f", a="x"), "", [("f", '{"a": "x"}')]),
    (QWEN3_CODER, f"So:\n{xml('f', a=QUOTED, n='5')}\n{xml('g')}", "So:", [("f", OF_QUOTED), G_CALL]),
    (QWEN3_CODER, xml("f", l='["a", {}]', n="five"), "", [("f", '{"l": ["a", {}], "n": "five"}')]),
    (QWEN3_CODER, xml("f", l='["a</parameter>\\\\"]', n='"\\"</parameter>"', a="x"), "", [("f", ENDS)]),
    (
        QWEN3_CODER,
        '<tool_call><function=f><parameter=n>5"</parameter><parameter=l>1</parameter></function>',
        "",
        [STRAY],
    ),
    (QWEN3_CODER, xml("f", l='no "', n="[\\"), "", [("f", json.dumps({"l": 'no "', "n": "[\\"}))]),
    (
        QWEN3_CODER,
        "<tool_call><function=f><parameter=n>\\</parameter></function>",
        "",
        [("f", '{"n": "\\\\"}')],
    ),
    (QWEN3_CODER, xml("f", n="NaN", a="5"), "", [("f", '{"n": "NaN", "a": "5"}')]),
    (QWEN3_CODER, xml("f", n="1e999", a="5"), "", [("f", '{"n": "1e999", "a": "5"}')]),
    (QWEN3_CODER, "<tool_call><function=f><parameter=a>x</parameter></function>", "", [("f", '{"a": "x"}')]),
    (QWEN3_CODER, "<tool_call><function=f><parameter=a>\nx</para", "", [("f", '{"a": "x')]),
    (QWEN3_CODER, "<tool_call><function=f></tool_call>", "", [("f", "{}")]),
    (QWEN3_CODER, "<tool_call>\n<func", "<tool_call>\n<func", []),
    (QWEN3_CODER, "<tool_call><function=>x", "<tool_call><function=>x", []),
    (JSON, f"[{F}, {G}]", "", [F_CALL, G_CALL]),
    (JSON, F, "", [F_CALL]),
    (JSON, "[1] says", "[1] says", []),
    (JSON, f"[{F}, 5]", "", [F_CALL]),
    (JSON, "  \n", "  \n", []),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_a_text(form: ToolFormat, text: str, content: str, calls: Calls) -> None:
    assert parsed(form, [text]) == (content, calls)
    for at in range(len(text)):
        assert parsed(form, [text[:at], text[at:]]) == (content, calls)
    assert parsed(form, list(text)) == (content, calls)
    assert parsed(form, [text], several=False) == (content, calls[:1])


words = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "<|python_tag|>",
            F,
            G,
            OF_LLAMA,
            "[",
            "]",
            ",",
            "; ",
        ),
        *(
            '{"name": "f", "arguments": ',
            "{",
            "}",
            '"',
            "\\",
            " ",
            "\n",
            "a",
            "\x1c",
            "{}",
            '{"id": 1, "name": "f"}',
        ),
        *("[ARGS]", "[CALL_ID]", "<function=f>", "<parameter=n>", "<parameter=a>", "</parameter>"),
        "</function>",
        *(" " * MAX_HELD, "x" * MAX_HELD, "<tool", "_call>", '{"name": "'),
    ]
)


@given(st.sampled_from(list(FORMATS.values())), st.lists(words, max_size=9).map("".join), st.data())
@example(JSON, " " * (MAX_HELD + 1) + F, None)
def test_pieces_change_nothing(form: ToolFormat, text: str, data: st.DataObject | None) -> None:
    cuts = [1] if data is None else sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    whole = parsed(form, [text])
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(form, pieces) == parsed(form, list(text)) == whole
    if not whole[1]:
        assert whole[0] == text


def test_arguments_come_as_they_are_written() -> None:
    parser = CallParser(HERMES, str)
    assert parser.push('<tool_call>{"name": "f", "argum') == ("", ())
    (begun,) = parser.push('ents": {"a"')[1][:1]
    assert (begun.name, begun.id) == ("f", "0")
    assert [delta.arguments for delta in parser.push(': "x')[1]] == [': "x']
    assert parser.push('y"}}</tool_call>')[1][0].arguments == 'y"}'


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, f"<tool_call>{F}</tool_call>"),
        (JSON, F),
        (LLAMA3, OF_LLAMA),
        (MISTRAL, f"[TOOL_CALLS][{F}]"),
        (MISTRAL_ARGS, '[TOOL_CALLS]f[ARGS]{"a": [1, "}"]}'),
        (QWEN3_CODER, xml("f", a="x")),
    ],
)
def test_it_is_known_if_a_call_was_cut_off(form: ToolFormat, text: str) -> None:
    seen = set[bool]()
    for end in range(len(text) + 1):
        parser = XmlCallParser(form, str, json_parameters=TYPED) if form.xml else CallParser(form, str)
        parser.push(text[:end])
        parser.flush()
        if parser.calls:
            seen.add(parser.calling)
            assert parser.calling is not is_json(parser.calls[0].arguments)
    assert seen == {True, False} and not parser.calling


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<tool_call>' }}", HERMES),
        ("{{ '[TOOL_CALLS]' }}", MISTRAL),
        ("{{ '<|python_tag|>' }}", LLAMA3),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', LLAMA3),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", MISTRAL_ARGS),
        ("{{ '<tool_call>\n<function=' }}", QWEN3_CODER),
        ("{{ '<function=' }}", JSON),
        ("{{ messages }}", JSON),
    ],
)
def test_a_template_says_the_format(template: str, form: ToolFormat) -> None:
    assert of_template(template) is form


def test_ids() -> None:
    assert HERMES.call_id("0" * 64) == f"call_{'0' * 24}"
    assert MISTRAL.call_id("0" * 64) == "0" * 9
