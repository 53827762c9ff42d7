"""Anthropic's Messages over HTTP: the answer of the same chat, in their shapes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from outrider.errors import Unavailable
from outrider.wire.session import FinishReason
from router.api import messages
from router.api.access import Access, HttpAccess
from router.api.http import create_app
from router.api.intake import Intake
from router.api.json_text import to_json
from router.api.keys import ApiKey, digest
from router.metrics import Metrics
from router.requests import SessionEnded
from tests.router.api.conftest import DRAWN
from tests.router.api.scripted import ScriptedRunner, served, steps
from tests.router.api.test_http import (
    CHAT_PROMPT,
    IDS,
    MODEL,
    TEXT,
    TOKENIZER,
    ClientOf,
    answering,
    speculation,
)

ASKED: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 40,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {}}]}],
}
USAGE = {
    "input_tokens": CHAT_PROMPT - 3,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 3,
    "output_tokens": len(IDS),
}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
ROOMY = served(TOKENIZER, max_context=256)
METRICS = {"speculative_decoding": speculation(4), "numerics_changes": 0}

Event = tuple[str | None, str, Any]  # id, name, data


async def events(response: httpx.Response) -> list[Event]:
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    *told, end = (await response.aread()).decode().split("\n\n")
    assert end == ""
    parsed = []
    for event in told:
        fields = dict(line.split(": ", 1) for line in event.split("\n"))
        data = json.loads(fields["data"])
        assert data["type"] == fields["event"]
        parsed.append((fields.get("id"), fields["event"], data))
    return parsed


async def test_a_message(client_of: ClientOf) -> None:
    runner = answering()
    answer = (await client_of(runner).post("/v1/messages", json=ASKED)).json()
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [{"type": "text", "text": TEXT, "citations": None}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": USAGE,
        "seed": DRAWN,
        "metrics": METRICS,
    }


async def test_a_text_by_a_schema_is_asked_for_as_the_same_chat_asks(client_of: ClientOf) -> None:
    runner = answering()
    client = client_of(runner)
    asked = {**ASKED, "output_config": {"format": FORMAT, "effort": "low"}, "user_profile_id": "ada"}
    answer = await client.post("/v1/messages", json=asked)
    assert answer.status_code == 200, answer.text
    told = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    chat = {"max_tokens": ASKED["max_tokens"], "messages": ASKED["messages"], "response_format": told}
    answer = await client.post("/v1/chat/completions", json={**chat, "reasoning_effort": "low"})
    assert answer.status_code == 200, answer.text
    message, same = (request.params for request in runner.requests)
    assert message.grammar == same.grammar != "" and message.prompt == same.prompt


async def test_it_asks_what_the_same_chat_asks(client_of: ClientOf) -> None:
    runner = ScriptedRunner(ROOMY, lambda request: steps(IDS, 4))
    client = client_of(runner)
    common = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 5, "num_speculative_tokens": 2}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "x", "citations": None}]},
        {"role": "user", "content": "y"},
    ]
    asked = {**common, "messages": turns, "max_tokens": 9, "stop_sequences": ["STOP"]}
    asked |= {"system": [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]}
    assert (await client.post("/v1/messages", json=asked)).status_code == 200
    turns[1] = {"role": "assistant", "content": "x"}
    chat = {**common, "max_tokens": 9, "stop": "STOP"}
    chat |= {"messages": [{"role": "system", "content": "be kind"}, *turns]}
    assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
    first, second = runner.requests
    assert first.params == second.params
    assert first.num_speculative_tokens == second.num_speculative_tokens == 2


@pytest.mark.parametrize(
    ("stops", "reason", "found"),
    [(["fox", "OP"], "stop_sequence", "fox"), ([], "end_turn", None), (["nowhere"], "end_turn", None)],
)
async def test_why_it_ended(client_of: ClientOf, stops: list[str], reason: str, found: str | None) -> None:
    runner = ScriptedRunner(MODEL, lambda request: [*steps(IDS, 4)[:-1], SessionEnded(FinishReason.STOP)])
    client = client_of(runner)
    asked = {**ASKED, "stop_sequences": stops}
    whole = (await client.post("/v1/messages", json=asked)).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, found)
    *_, (_, name, last), _ = await events(await client.post("/v1/messages", json={**asked, "stream": True}))
    assert (name, last["delta"]) == ("message_delta", {"stop_reason": reason, "stop_sequence": found})


async def test_a_stream(client_of: ClientOf) -> None:
    told = await events(await client_of(answering(2)).post("/v1/messages", json={**ASKED, "stream": True}))
    deltas = [data for _, name, data in told if name == "content_block_delta"]
    assert [name for _, name, _ in told] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * len(deltas),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert len(deltas) > 3 and "".join(each["delta"]["text"] for each in deltas) == TEXT
    start = told[0][2]["message"]
    assert (start["content"], start["stop_reason"], start["seed"]) == ([], None, DRAWN)
    assert start["usage"] == {
        **USAGE,
        "input_tokens": CHAT_PROMPT,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
    }
    assert told[-2][2] == {
        "type": "message_delta",
        "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
        "usage": USAGE,
        "metrics": {"speculative_decoding": speculation(2), "numerics_changes": 0},
    }


async def test_a_stream_goes_on_after_any_event(client_of: ClientOf) -> None:
    client = client_of(answering(2))
    whole = await events(await client.post("/v1/messages", json={**ASKED, "stream": True}))
    places = [index for index, (id, _, _) in enumerate(whole) if id is not None]
    assert len(places) > 4
    for index in places:
        id = whole[index][0]
        again = await client.post(
            "/v1/messages", json={**ASKED, "stream": True}, headers={"last-event-id": str(id)}
        )
        assert await events(again) == whole[index + 1 :]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"max_tokens": 0}, "max_tokens must be from 1 to"),
        ({"tools": [{"input_schema": {}}]}, "that of tool 0 is null"),
        ({"tools": [{"type": "bash_20250124", "name": "x"}]}, "type \"custom\"; tool 0 is 'bash_20250124'"),
        ({"tools": [{"name": "f", "input_schema": 5}]}, "each have a JSON schema of an object, if any"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tool_choice": {"type": "any", "disable_parallel_tool_use": 0}}, "must have true or false as"),
        ({"tools": [{"name": "f", "input_schema": {}, "strict": 0}]}, "must have true or false as strict"),
        ({"tool_choice": {"type": "tool"}}, "of type auto, any, none, or tool with a name"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "tool_use, which is the assistant's only"),
        ({"messages": [{"role": "user", "content": [{**USE, "input": "x"}]}]}, "an object as input"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id in part 0"),
        ({"thinking": {"type": "often"}}, "thinking must be an object of type disabled, enabled, adaptive"),
        ({"thinking": {"type": {}}}, "thinking must be an object of type disabled, enabled, adaptive"),
        ({"output_config": {"effort": "much"}}, "output_config must have an effort of low, medium, high"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config must have a schema at"),
        (
            {"output_config": {"format": {**FORMAT, "schema": {"uniqueItems": True}}}},
            "output_config.format.schema",
        ),
        (
            {"tools": [{"name": "f", "input_schema": {"uniqueItems": True}}], "tool_choice": {"type": "any"}},
            "tools[0].input_schema",
        ),
        ({"output_config": {"speed": 1}}, "output_config has the field 'speed'"),
        ({"container": "c"}, "container is not supported by this server"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role must be user or assistant"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages must end with a turn of the user"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "part 0 is of type 'image'"),
        ({"nonsense": 1}, "unknown field nonsense"),
        ({"messages": [{"role": "user", "content": "x" * 10_000}]}, "messages has 10"),
    ],
)
async def test_what_is_refused(client_of: ClientOf, changes: dict[str, Any], message: str) -> None:
    body = {name: value for name, value in {**ASKED, **changes}.items() if value is not None}
    response = await client_of(answering()).post("/v1/messages", json=body)
    told = response.json()
    assert (response.status_code, told["type"], told["error"]["type"]) == (
        400,
        "error",
        "invalid_request_error",
    )
    assert message in told["error"]["message"]


async def test_errors_have_anthropics_types(client_of: ClientOf) -> None:
    runner = answering()
    client = client_of(runner)
    told = []
    for body, path in (({**ASKED, "model": "other"}, ""), (ASKED, "/count_tokens/x")):
        response = await client.post(f"/v1/messages{path}", json=body)
        told.append((response.status_code, response.json()["error"]["type"]))
    runner.is_full = True
    response = await client.post("/v1/messages", json=ASKED)
    told.append((response.status_code, response.json()["error"]["type"]))
    assert told == [(404, "not_found_error"), (404, "invalid_request_error"), (429, "rate_limit_error")]
    assert response.headers["retry-after"] == "7"
    lost = client_of(ScriptedRunner(MODEL, lambda request: [*steps(IDS, 4)[:2], Unavailable("lost")]))
    *_, (_, name, last) = await events(await lost.post("/v1/messages", json={**ASKED, "stream": True}))
    error = {"type": "overloaded_error", "message": "lost"}
    assert (name, last) == ("error", {"type": "error", "error": error})


async def test_tokens_are_counted(client_of: ClientOf) -> None:
    client = client_of(answering())
    asked = {name: ASKED[name] for name in ("model", "messages")}
    assert (await client.post("/v1/messages/count_tokens", json=asked)).json() == {
        "input_tokens": CHAT_PROMPT
    }
    longer = (await client.post("/v1/messages/count_tokens", json={**asked, "system": "be kind"})).json()
    assert longer["input_tokens"] > CHAT_PROMPT


async def test_a_key_as_anthropics_clients_show_it() -> None:
    key = ApiKey("alice", digest("secret"))
    metrics = Metrics()
    app = create_app(Intake(answering(), lambda limit: 0), metrics)
    app.add_middleware(HttpAccess, access=Access(lambda: (key,), metrics))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        for headers, status in (
            ({"x-api-key": "secret"}, 200),
            ({"x-api-key": "wrong"}, 401),
            ({"authorization": "Bearer wrong", "x-api-key": "secret"}, 401),
            ({}, 401),
        ):
            response = await client.post("/v1/messages", json=ASKED, headers=headers)
            assert response.status_code == status, headers
        assert response.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ('{"a": ', {}),
        ("[1]", {}),
        (r'{"a": "\ud800"}', {}),
        ('{"a": 1e999}', {}),
        ('{"a": NaN}', {}),
        ('{"a":' * 400 + "1" + "}" * 400, {}),
    ],
)
def test_what_a_model_calls_with_is_told_if_it_can_be(arguments: str, told: object) -> None:
    assert messages._input(arguments) == told
    to_json(messages._input(arguments)).encode()
