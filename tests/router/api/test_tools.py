"""Tools over HTTP and gRPC: what the model is told, what it must write, and how its calls come back."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from tokenizers import AddedToken

from outrider.errors import InvalidRequest
from outrider.options.sessions import TOOL_CALL_PARSERS
from outrider.v1 import generation_pb2
from router.api import generation_wire, schema
from router.api.reading import Formats
from router.api.validation import Generation, prepare
from router.tool_formats import FORMATS, HERMES, LLAMA3, MISTRAL_ARGS, OF_TEMPLATE, ToolFormat
from tests.router.api.scripted import (
    TEMPLATE,
    Tokenizer,
    byte_level,
    files,
    served,
)
from tests.router.api.test_structured import obeys

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string"}},
}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "the time"}}
TOOLS = [WEATHER, CLOCK]
CHAT = [{"role": "user", "content": "hi"}]
A, B = '{"city": "Ü{"}', "{}"


def tokenizer(*special: str) -> Tokenizer:
    made = byte_level()
    made.add_tokens([AddedToken(marker, special=False) for marker in HERMES.markers])
    made.add_special_tokens([*MISTRAL_ARGS.markers, LLAMA3.opening])
    return made


TOKENIZER = tokenizer()
MODEL = served(TOKENIZER, max_context=4096)


def asked(parser: str = "hermes", **fields: Any) -> Generation:
    body = schema.parse(schema.ChatRequest, {"messages": CHAT, "tools": TOOLS, **fields})
    return prepare(body, MODEL, lambda below: 0, Formats(parser))


def grammar(parser: str = "hermes", **fields: Any) -> str:
    return asked(parser, **fields).sessions[0].params.grammar


def written(form: ToolFormat, *calls: tuple[str, str]) -> str:
    """As models write calls."""
    objects = [f'{{"name": "{name}", "{form.arguments}": {arguments}}}' for name, arguments in calls]
    if form.naming:
        objects = [f"{name}{form.naming}{arguments}" for name, arguments in calls]
    if form.xml:
        objects = [of_xml(name, json.loads(arguments)) for name, arguments in calls]
    return form.before + form.between.join(objects) + form.after


def of_xml(name: str, parameters: dict[str, object]) -> str:
    told = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<function={name}>\n{told}</function>"


def test_the_option_names_every_format() -> None:
    assert (OF_TEMPLATE, *FORMATS) == TOOL_CALL_PARSERS


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_a_call_that_must_come_is_the_only_text(form: ToolFormat) -> None:
    one, both = written(form, ("weather", A)), written(form, ("weather", A), ("clock", B))
    other = written(form, ("clock", B))
    choices: list[tuple[dict[str, Any], dict[str, bool]]] = [
        ({"tool_choice": "required"}, {one: True, both: True, other: True}),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {one: True, both: False, other: True}),
        (
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
            {one: True, both: False, other: False},
        ),
    ]
    for fields, texts in choices:
        must = grammar(form.name, **fields)
        bad = '{"town": "x"}' if form.xml else '{"city": 5}'
        wrong = {"hello": False, written(form, ("weather", bad)): False, "": False}
        wrong[written(form, ("clock", '{"a": 5}'))] = False  # it names no parameters, so it has none
        assert {text: obeys(must, text, TOKENIZER, MODEL) for text in texts | wrong} == texts | wrong


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
@pytest.mark.parametrize(
    ("structure", "content"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": 1}'),
        ({"structured_outputs": {"regex": "a+"}}, "aa"),
        ({"structured_outputs": {"grammar": 'start: "b"'}}, "b"),
    ],
)
def test_a_text_calls_tools_or_is_as_it_must_be(
    form: ToolFormat, structure: dict[str, Any], content: str
) -> None:
    opening = form.opening if form.bare else ""  # or it could begin as the text does
    may = grammar(form.name, **structure)
    call = opening + written(form, ("weather", A))
    assert [obeys(may, text, TOKENIZER, MODEL) for text in (call, content, "hello")] == [True, True, False]
    assert grammar(form.name, **structure, tool_choice="none") == grammar(form.name, **structure, tools=[])


def test_what_may_be_called_or_not_costs_no_grammar() -> None:
    assert grammar() == grammar(tool_choice="auto") == grammar(tool_choice="none") == ""
    assert asked(tool_choice="none").calls is None and asked(tools=[]).calls is None
    assert asked(OF_TEMPLATE).calls == asked("json").calls


STRICT = [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}, CLOCK]


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_strict_tools_are_held_to_their_schemas_once_they_are_called(form: ToolFormat) -> None:
    may = grammar(form.name, tools=STRICT)
    good, bad = ('{"city": "x"}', '{"town": "x"}' if form.xml else '{"city": 5}')
    before = "" if form.bare else "So { [ <tool [TOOL :\n"
    texts = {
        "": True,
        " the fox < {": True,
        before + written(form, ("weather", good)): True,
        before + written(form, ("weather", bad)): False,
        before + written(form, ("clock", "{}")): True,
        before + written(form, ("weather", good), ("clock", "{}")): True,
        before + form.opening + "fox": not form.opening,
        before + written(form, ("weather", good)) + "fox": False,
    }
    if not form.xml:
        texts[written(form, ("clock", '{"a": 5}'))] = True
    assert {text: obeys(may, text, TOKENIZER, MODEL) for text in texts} == texts
    assert grammar(form.name, tools=STRICT, tool_choice="none") == ""
    one = grammar(form.name, tools=STRICT, parallel_tool_calls=False)
    assert not obeys(one, written(form, ("weather", good), ("clock", "{}")), TOKENIZER, MODEL)


def test_parameters_in_tags_obey_their_schemas() -> None:
    city = {"type": "string", "enum": ["Paris", 'a "b"']}
    properties = {
        "city": city,
        "days": {"$ref": "#/$defs/days"},
        "note": {"type": "string", "minLength": 2, "maxLength": 4},
        "free": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    }
    parameters = {"type": "object", "properties": properties, "required": ["city", "days"]}
    parameters["$defs"] = {"days": {"type": "array", "items": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    must = grammar("qwen3_coder", tools=tools, tool_choice="required")
    form = FORMATS["qwen3_coder"]
    for told, fits in (
        ('{"city": "Paris", "days": "[1, 2]"}', True),
        ('{"city": "Paris", "days": "[1]", "note": "a<b", "free": "null"}', True),
        ('{"city": "Rome", "days": "[1, 2]"}', False),
        ('{"city": "Paris", "days": "[true]"}', False),
        ('{"city": "Paris"}', False),
        ('{"city": "Paris", "days": "[]", "note": "a"}', False),
        ('{"city": "Paris", "days": "[]", "note": "abcde"}', False),
    ):
        assert obeys(must, written(form, ("weather", told)), TOKENIZER, MODEL) is fits, told
    reading = asked("qwen3_coder", tools=tools).calls
    assert reading is not None and reading.json_parameters == {"weather": ("days", "free")}


def test_parameters_in_tags_may_have_any_schema() -> None:
    """A client's schema says what it likes; the grammar is refused, or it is not, and nothing is raised."""
    deep: Any = {"type": "string"}
    for _ in range(200):
        deep = {"anyOf": [deep]}
    for one in (
        True,
        None,
        5,
        {"$ref": "#/$defs/x"},
        {"$ref": "#/a/b"},
        deep,
        {"minLength": "9"},
        {"enum": []},
    ):
        for parameters in ({"properties": {"p": one}, "required": 7, "$defs": []}, {"properties": []}):
            tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
            with suppress(InvalidRequest):
                grammar("qwen3_coder", tools=tools, tool_choice="required")


TOLD = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{{ message | tojson }}\n{% endfor %}"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "x"}'}}


def test_a_template_is_told_of_tools_and_calls() -> None:
    model = served(TOKENIZER, max_context=4096)
    told = served(TOKENIZER, max_context=4096)
    object.__setattr__(told, "tokenizer", scripted_files(TOLD))
    messages = [
        *CHAT,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}],
        },
    ]
    body = schema.parse(schema.ChatRequest, {"messages": messages, "tools": TOOLS})
    text = TOKENIZER.decode(prepare(body, told, lambda below: 0).sessions[0].params.prompt)
    first, *lines = text.splitlines()
    tools, turn = json.JSONDecoder().raw_decode(first)
    assert tools == TOOLS
    assert [json.loads(line) for line in (first[turn:], *lines)] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [with_arguments("weather", {"city": "x"})]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        {"role": "assistant", "content": "", "tool_calls": [with_arguments("f", "{")]},
    ]
    prepare(body, model, lambda below: 0)  # a template that says nothing of tools leaves them out


def with_arguments(name: str, arguments: object) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def scripted_files(template: str = TEMPLATE) -> Any:
    return files(TOKENIZER, template)


def test_grpc_asks_for_the_same() -> None:
    Pb = generation_pb2
    turns = [
        Pb.ChatMessage(role="user", content="hi"),
        Pb.ChatMessage(
            role="assistant", tool_calls=[Pb.ToolCall(id="c1", name="weather", arguments='{"city": "x"}')]
        ),
        Pb.ChatMessage(role="tool", content="rain", tool_call_id="c1"),
    ]
    request = Pb.GenerateRequest(
        chat=Pb.Chat(messages=turns),
        tools=[
            Pb.Tool(name="weather", parameters=json.dumps(PARAMETERS)),
            Pb.Tool(name="clock", description="the time"),
        ],
        tool_choice=Pb.ToolChoice(name="clock"),
        parallel_tool_calls=False,
    )
    over_http = {
        "messages": [
            *CHAT,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        ],
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "clock"}},
        "parallel_tool_calls": False,
    }
    told = generation_wire.body(request.SerializeToString())
    assert isinstance(told, schema.ChatRequest)
    expected = schema.parse(schema.ChatRequest, over_http)
    for field in ("messages", "tools", "tool_choice", "parallel_tool_calls"):
        assert getattr(told, field) == getattr(expected, field)
    for choice, kind in (
        ({"auto": True}, "auto"),
        ({"none": True}, "none"),
        ({"required": True}, "required"),
    ):
        request.tool_choice.CopyFrom(Pb.ToolChoice(**choice))
        one = generation_wire.body(request.SerializeToString())
        assert isinstance(one, schema.ChatRequest) and one.tool_choice.kind == kind
    with pytest.raises(InvalidRequest, match="tools is not supported"):
        generation_wire.body(Pb.GenerateRequest(text="a", tools=[Pb.Tool(name="f")]).SerializeToString())
    with pytest.raises(InvalidRequest, match=r"tools\[0\].parameters is no JSON"):
        wrong = Pb.GenerateRequest(chat=Pb.Chat(messages=turns), tools=[Pb.Tool(name="f", parameters="{")])
        generation_wire.body(wrong.SerializeToString())


LARGE = [{"type": "function", "function": {"name": f"f{n}", "description": "x" * 32_000}} for n in range(9)]
DEEP: dict[str, Any] = {}
for _ in range(200):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"tools": {}}, "tools", "must be an array, not an object"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tool 0 is 'web_search'"),
        ({"tools": [{"type": "function"}]}, "tools", "that of tool 0 is null"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "that of tool 0 is 'a b'"),
        ({"tools": [CLOCK] * 2}, "tools", "different names; two are 'clock'"),
        ({"tools": [CLOCK] * 129}, "tools", "must be at most 128 tools, not 129"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": "x"}}]},
            "tools",
            "is none",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
            "tools",
            "schema of an object",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "a", "parameters": {"enum": ["x" * 20_000]}}}
                ]
            },
            "tools",
            "may have 16384 bytes",
        ),
        ({"tools": LARGE}, "tools", "may have 262144 bytes as JSON"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "c"}}},
            "tool_choice",
            "'c', which is none",
        ),
        ({"tool_choice": "any"}, "tool_choice", "auto, none, required"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "true or false"),
        (
            {
                "tool_choice": "required",
                "tools": [
                    CLOCK,
                    {
                        "type": "function",
                        "function": {"name": "a", "parameters": {"properties": {"b": {"uniqueItems": True}}}},
                    },
                ],
            },
            "tools[1].function.parameters.properties.b",
            "uniqueItems",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "a", "parameters": DEEP}}],
            },
            "tools[0].function.parameters",
            "recursion limit",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": name,
                            "parameters": {"properties": {"a": {"enum": ["x" * 12_000]}}},
                        },
                    }
                    for name in "abc"
                ],
            },
            "tools",
            "may have 32768 bytes",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]},
            "messages[0].tool_calls",
            "assistant's only",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "tool_call_id": "x"}]},
            "messages[0].tool_call_id",
            "tool's only",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content", "is required"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL] * 129}]},
            "messages[0].tool_calls",
            "at most 128",
        ),
    ],
)
def test_what_is_refused(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        asked(**fields)
    assert (refused.value.field, words in refused.value.message) == (field, True), refused.value.message
