"""Tools on the routes of Responses and Messages: the chat of the same turns, told in their shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from outrider.wire.logprobs import Logprob
from outrider.wire.session import FinishReason
from router.requests import SessionEnded, TokensCommitted
from tests.router.api.scripted import Logs, ScriptedRunner, application
from tests.router.api.test_http import ClientOf
from tests.router.api.test_messages import Event, events
from tests.router.api.test_tool_answers import SAID, TWO, copied, hermes, saying
from tests.router.api.test_tools import MODEL, PARAMETERS, TOKENIZER, TOOLS

OF_RESPONSES = [{"type": "function", **tool["function"]} for tool in TOOLS]
OF_MESSAGES = [
    {"name": "weather", "input_schema": PARAMETERS, "cache_control": {"type": "ephemeral"}},
    {"type": "custom", "name": "clock", "description": "the time", "input_schema": {"type": "object"}},
]
RESPONSE: dict[str, Any] = {"input": "hi", "tools": OF_RESPONSES}
MESSAGE: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "tools": OF_MESSAGES,
    "max_tokens": 300,
}
SCHEMAS = application().openapi()


def validate(path: str, answer: Any) -> None:
    content = SCHEMAS["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]
    Draft202012Validator({**content["schema"], "components": SCHEMAS["components"]}).validate(answer)


async def test_a_response_calls(client_of: ClientOf) -> None:
    client = hermes(client_of, saying(SAID))
    answer = (await client.post("/v1/responses", json=RESPONSE)).json()
    validate("/v1/responses", answer)
    message, *calls = answer["output"]
    assert (answer["status"], message["content"][0]["text"]) == ("completed", "Let me see.")
    assert [(call["type"], call["name"], call["arguments"]) for call in calls] == [
        ("function_call", *one) for one in TWO
    ]
    assert [tool["name"] for tool in answer["tools"]] == ["weather", "clock"]


async def test_a_message_calls(client_of: ClientOf) -> None:
    client = hermes(client_of, saying(SAID))
    answer = (await client.post("/v1/messages", json=MESSAGE)).json()
    validate("/v1/messages", answer)
    text, *uses = answer["content"]
    assert (answer["stop_reason"], text["text"]) == ("tool_use", "Let me see.")
    assert [(use["type"], use["name"], use["input"]) for use in uses] == [
        ("tool_use", name, json.loads(arguments)) for name, arguments in TWO
    ]
    more = {**MESSAGE, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    assert len((await client.post("/v1/messages", json=more)).json()["content"]) == 2
    counts = [
        (
            await client.post("/v1/messages/count_tokens", json={"messages": MESSAGE["messages"], **fields})
        ).json()
        for fields in ({}, {"tools": OF_MESSAGES})
    ]
    assert counts[0] == counts[1]  # the template at hand says nothing of tools


async def test_they_ask_what_the_same_chat_asks(client_of: ClientOf) -> None:
    runner = saying(SAID)
    client = hermes(client_of, runner)
    arguments = '{"city": "x"}'
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    function = {"type": "function", "function": {"name": "clock"}}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "so", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "user", "content": "and?"},
    ]
    chat = {"messages": turns, "tools": TOOLS, "tool_choice": function, "max_tokens": 30, "seed": 1}
    item = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": arguments, "id": "fc_1"}
    response = {
        "input": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
            item,
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
            {"role": "user", "content": "and?"},
        ],
        "tools": OF_RESPONSES,
        "tool_choice": {"type": "function", "name": "clock"},
        "max_output_tokens": 30,
        "seed": 1,
    }
    use = {"type": "tool_use", "id": "c1", "name": "weather", "input": json.loads(arguments)}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "rain"}]}
    message = {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "text", "text": "so"}, use]},
            {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
        ],
        "tools": OF_MESSAGES,
        "tool_choice": {"type": "tool", "name": "clock"},
        "max_tokens": 30,
        "seed": 1,
    }
    for path, body in (("chat/completions", chat), ("responses", response), ("messages", message)):
        answer = await client.post(f"/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
    first, *others = [request.params for request in runner.requests]
    assert first.grammar and all(other.prompt == first.prompt and other.max_tokens == 30 for other in others)
    assert others[0].grammar == first.grammar
    shape = {"type": "json_schema", "name": "x", "schema": PARAMETERS, "strict": True}
    answer = await client.post("/v1/responses", json={"input": "hi", "text": {"format": shape}})
    assert answer.json()["text"]["format"]["schema"] == PARAMETERS
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
    await client.post("/v1/chat/completions", json={"messages": turns[:1], "response_format": asked})
    assert runner.requests[-1].params == runner.requests[-2].params


async def test_the_events_of_a_response(client_of: ClientOf) -> None:
    client = hermes(client_of, saying(SAID, 2))
    told = await events(await client.post("/v1/responses", json={**RESPONSE, "stream": True}))
    names = [name.removeprefix("response.") for _, name, _ in told]
    of_call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    of_call.append("output_item.done")
    assert [name for index, name in enumerate(names) if name != names[index - 1]] == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", *of_call, *of_call, "completed"),
    ]
    numbers = [data["sequence_number"] for _, _, data in told]
    assert numbers == sorted(set(numbers))
    items = [data["item"] for _, name, data in told if name == "response.output_item.done"]
    last = told[-1][2]["response"]
    assert last["output"] == items
    for index, (name, arguments) in enumerate(TWO, 1):
        of_item = [data for _, _, data in told if data.get("output_index") == index]
        deltas = [data["delta"] for data in of_item if "delta" in data]
        assert "".join(deltas) == of_item[-2]["arguments"] == arguments
        assert of_item[0]["item"] == {**items[index], "arguments": "", "status": "in_progress"}
        assert items[index]["name"] == name


async def test_the_events_of_a_message(client_of: ClientOf) -> None:
    client = hermes(client_of, saying(SAID, 2))
    told = await events(await client.post("/v1/messages", json={**MESSAGE, "stream": True}))
    names = [name for _, name, _ in told]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [name for index, name in enumerate(names) if name != names[index - 1]] == [
        *("message_start", *block, *block, *block, "message_delta", "message_stop")
    ]
    assert told[-2][2]["delta"]["stop_reason"] == "tool_use"
    for index, (name, arguments) in enumerate(TWO, 1):
        of_block = [data for _, _, data in told if data.get("index") == index]
        block_told = of_block[0]["content_block"]
        assert (block_told["type"], block_told["name"], block_told["input"]) == ("tool_use", name, {})
        assert "".join(data["delta"]["partial_json"] for data in of_block[1:-1]) == arguments


def told_of(told: list[Event]) -> list[tuple[str, str]]:
    """What a stream tells, without where it was cut: deltas in a row are one."""
    found: list[tuple[str, str]] = []
    for _, name, data in told:
        delta = data.get("delta")
        if isinstance(delta, dict) and "type" in delta:
            delta = delta.get("text", delta.get("partial_json"))
        if isinstance(delta, str):
            if found and found[-1][0] == name:
                delta = found.pop()[1] + delta
            found.append((name, delta))
        else:
            kept = {key: value for key, value in data.items() if key != "sequence_number"}
            found.append((name, json.dumps(kept)))
    return found


@pytest.mark.parametrize(("path", "asked"), [("responses", RESPONSE), ("messages", MESSAGE)])
async def test_a_stream_goes_on_at_another_router_whose_steps_are_others(
    client_of: ClientOf, path: str, asked: dict[str, Any]
) -> None:
    logs: Logs = {}
    body = {**asked, "stream": True}
    whole = await events(await hermes(client_of, saying(SAID, 2, logs)).post(f"/v1/{path}", json=body))
    places = [index for index, (id, _, _) in enumerate(whole) if id is not None]
    assert len(places) > 10
    for index in places[::3]:
        again = hermes(client_of, saying(SAID, 5, copied(logs), forgets=8))
        headers = {"last-event-id": str(whole[index][0])}
        rest = await events(await again.post(f"/v1/{path}", json=body, headers=headers))
        both = told_of(whole[: index + 1] + rest)
        numberless = [(name, strip(data)) for name, data in both]
        assert numberless == [(name, strip(data)) for name, data in told_of(whole)]


def strip(data: str) -> str:
    """Without the figures of speculation, which other steps change."""
    try:
        told = json.loads(data)
    except ValueError:
        return data
    if isinstance(told, dict):
        told.pop("metrics", None)
        (told.get("response") or {}).pop("metrics", None)
    return json.dumps(told)


async def test_a_response_has_log_probabilities(client_of: ClientOf) -> None:
    ids = TOKENIZER.encode("the fox", add_special_tokens=False).ids

    def script(request: Any) -> Any:
        assert request.params.logprobs == 1
        one = [TokensCommitted((id,), 0, 0, logprobs=(Logprob(-0.5, ((id, -0.5),)),)) for id in ids]
        return [*one, SessionEnded(FinishReason.STOP)]

    client = client_of(ScriptedRunner(MODEL, script))
    asked = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    answer = (await client.post("/v1/responses", json=asked)).json()
    validate("/v1/responses", answer)
    told = answer["output"][0]["content"][0]["logprobs"]
    assert "".join(one["token"] for one in told) == "the fox"
    assert all(len(one["top_logprobs"]) == 1 and one["logprob"] == -0.5 for one in told)
    stream = await events(await client.post("/v1/responses", json={**asked, "stream": True}))
    deltas = [data["logprobs"] for _, name, data in stream if name == "response.output_text.delta"]
    done = [data["logprobs"] for _, name, data in stream if name == "response.output_text.done"]
    assert [one for delta in deltas for one in delta] == done[0] == told
