"""OpenAI's Responses over HTTP: the answer of the same chat, in their shapes."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.errors import Unavailable
from outrider.wire.session import FinishReason
from router.requests import SessionEnded
from tests.router.api.conftest import DRAWN
from tests.router.api.scripted import ScriptedRunner, steps
from tests.router.api.test_http import CHAT_PROMPT, IDS, MODEL, TEXT, ClientOf, answering
from tests.router.api.test_messages import METRICS, ROOMY, events

ASKED: dict[str, Any] = {"model": "demo", "input": "hi", "metadata": {"a": "b"}, "store": False}
USAGE = {
    "input_tokens": CHAT_PROMPT,
    "input_tokens_details": {"cached_tokens": 3},
    "output_tokens": len(IDS),
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": CHAT_PROMPT + len(IDS),
}


async def test_a_response(client_of: ClientOf) -> None:
    answer = (await client_of(answering()).post("/v1/responses", json=ASKED)).json()
    identity = answer.pop("id").removeprefix("resp_")
    assert answer == {
        "object": "response",
        "created_at": 1234,
        "status": "incomplete",
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"},
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {"a": "b"},
        "model": "demo",
        "output": [
            {
                "id": f"msg_{identity}",
                "type": "message",
                "status": "incomplete",
                "role": "assistant",
                "content": [{"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}],
            }
        ],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "seed": DRAWN,
        "store": False,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": USAGE,
        "metrics": METRICS,
    }


async def test_a_format_is_repeated_as_it_was_asked_for(client_of: ClientOf) -> None:
    told = {"type": "json_schema", "name": "x", "description": "y", "strict": False, "schema": {}}
    for asked in (told, {**told, "description": None}, {"type": "json_schema", "name": "x", "schema": {}}):
        answer = await client_of(answering()).post("/v1/responses", json={**ASKED, "text": {"format": asked}})
        expected = {"strict": True} | {name: value for name, value in asked.items() if value is not None}
        assert answer.json()["text"] == {"format": expected}


async def test_it_asks_what_the_same_chat_asks(client_of: ClientOf) -> None:
    runner = ScriptedRunner(ROOMY, lambda request: steps(IDS, 4))
    client = client_of(runner)
    said = (await client.post("/v1/responses", json=ASKED)).json()["output"]
    common = {"temperature": 0.5, "top_p": 0.9, "seed": 5, "num_speculative_tokens": 2}
    text = [{"type": "input_text", "text": "hi"}]
    items = [{"role": "user", "content": text}, *said, {"type": "message", "role": "user", "content": "y"}]
    asked = {**common, "input": items, "instructions": "b", "max_output_tokens": 9}
    assert (await client.post("/v1/responses", json=asked)).status_code == 200
    turns = [("system", "b"), ("user", "hi"), ("assistant", TEXT), ("user", "y")]
    messages = [{"role": role, "content": content} for role, content in turns]
    chat = {**common, "messages": messages, "max_tokens": 9}
    assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
    _, first, second = runner.requests
    assert first.params == second.params
    assert first.num_speculative_tokens == second.num_speculative_tokens == 2


async def test_a_stream(client_of: ClientOf) -> None:
    runner = ScriptedRunner(MODEL, lambda request: [*steps(IDS, 2)[:-1], SessionEnded(FinishReason.STOP)])
    client = client_of(runner)
    told = await events(await client.post("/v1/responses", json={**ASKED, "stream": True}))
    deltas = [data["delta"] for _, name, data in told if name == "response.output_text.delta"]
    assert [name.removeprefix("response.") for _, name, _ in told] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * len(deltas),
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert len(deltas) > 3 and "".join(deltas) == TEXT
    numbers = [data["sequence_number"] for _, _, data in told]
    assert numbers == sorted(set(numbers))
    last = told[-1][2]["response"]
    assert last["status"] == "completed" and last["usage"] == USAGE
    assert last["output"] == [told[-2][2]["item"]]
    whole = (await client.post("/v1/responses", json=ASKED)).json()
    assert whole["output"][0]["content"] == last["output"][0]["content"]


async def test_a_stream_goes_on_after_any_event(client_of: ClientOf) -> None:
    client = client_of(answering(2))
    whole = await events(await client.post("/v1/responses", json={**ASKED, "stream": True}))
    places = [index for index, (id, _, _) in enumerate(whole) if id is not None]
    assert len(places) > 4
    for index in places:
        headers = {"last-event-id": str(whole[index][0])}
        again = await client.post("/v1/responses", json={**ASKED, "stream": True}, headers=headers)
        assert await events(again) == whole[index + 1 :]
    identity = whole[-1][2]["response"]["id"]
    assert await events(await client.get(f"/v1/sessions/{identity}/events")) == whole


SAID = {"role": "user", "content": "the fox"}


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"store": True}, "store", "store is not supported by this server, but for false"),
        (
            {"tools": [{"type": "web_search"}]},
            "tools",
            "tool 0 is 'web_search'",
        ),
        ({"tools": [{"type": "function"}]}, "tools", "that of tool 0 is null"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
        ({"tool_choice": {"type": "x"}}, "tool_choice", "auto, none, required, or a function"),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "must have a schema at format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text", "text, json_object, json_schema, not 'xml'"),
        ({"text": {"verbosity": "low"}}, "text", "verbosity as medium"),
        ({"include": ["x"]}, "include", "must be an array of any of message.output_text.logprobs"),
        ({"top_logprobs": 21}, "top_logprobs", "must be in [0, 20], not 21"),
        ({"previous_response_id": "x"}, "previous_response_id", "previous_response_id is not supported"),
        ({"input": []}, "input", "input must be from 1 to 4096 items, not 0"),
        ({"input": [{"type": "image"}]}, "input", "item 0 is of type 'image'"),
        ({"input": [{"type": "function_call"}]}, "input", "must have name in item 0"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": 5}]}, "input", "a string"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", "item 0 has 'tool'"),
        ({"input": "x" * 10_000}, "input", "input has 10"),
        (
            {"input": [SAID, {"role": "user", "content": [{"type": "x"}]}]},
            "input",
            "part 0 is of type 'x', in item 1",
        ),
        ({"input": [SAID, {"role": "user", "content": 5}]}, "input", "in item 1"),
        (
            {
                "tools": [{"type": "function", "name": "f", "parameters": {"uniqueItems": True}}],
                "tool_choice": "required",
            },
            "tools[0].parameters",
            "tools[0].parameters",
        ),
        ({"max_output_tokens": 100}, "max_output_tokens", "max_output_tokens must be from 1 to"),
        ({"metadata": {"a": 1}}, "metadata", "metadata must be an object of strings"),
        ({"temperature": -1}, "temperature", "temperature must be"),
    ],
)
async def test_what_is_refused(
    client_of: ClientOf, changes: dict[str, Any], field: str, message: str
) -> None:
    response = await client_of(answering()).post("/v1/responses", json={**ASKED, **changes})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert message in error["message"]


async def test_a_stream_that_fails(client_of: ClientOf) -> None:
    lost = client_of(ScriptedRunner(MODEL, lambda request: [*steps(IDS, 4)[:2], Unavailable("lost")]))
    *_, (_, _, before), (_, name, last) = await events(
        await lost.post("/v1/responses", json={**ASKED, "stream": True})
    )
    told = {"code": "unavailable_error", "message": "lost", "param": None}
    assert (name, last) == (
        "error",
        {"type": "error", **told, "sequence_number": before["sequence_number"] + 1},
    )
