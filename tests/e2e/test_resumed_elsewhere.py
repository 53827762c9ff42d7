"""What a client is told of an answer whose stream broke off at one router and is gone on with at another: the
same as if nothing had happened, whatever it asked for. All real processes."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import grpc.aio
import httpx
import pytest
from google.protobuf.json_format import MessageToDict

from outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.e2e.two_routers import Service

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 60}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
FLAT = {"type": "function", "name": "weather", "parameters": CITY}
ROWS = {
    "type": "array",
    "items": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}},
    "minItems": 8,
    "maxItems": 12,
}
TEXT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"
TURNS = [{"role": "user", "content": "Write a function that adds two numbers."}]
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "log-probabilities": (COMPLETION, {"prompt": TEXT, "logprobs": 3}),
    "a prompt's, and echo": (COMPLETION, {"prompt": TEXT, "logprobs": 1, "echo": True, "prompt_logprobs": 1}),
    "several prompts, n, stop": (COMPLETION, {"prompt": [TEXT, "x ="], "n": 2, "stop": ["\n\n\n", "zz"]}),
    "the likeliest": (COMPLETION, {"prompt": TEXT, "n": 2, "best_of": 4, "logprobs": 0, "max_tokens": 30}),
    "a prediction": (
        COMPLETION,
        {"prompt": TEXT, "temperature": 0, "prediction": {"type": "content", "content": TEXT * 3}},
    ),
    "where tokens came from": (COMPLETION, {"prompt": TEXT, "return_speculation": True}),
    "a choice": (COMPLETION, {"prompt": TEXT, "structured_outputs": {"choice": ["ab" * 40, "ba" * 40]}}),
    "a regex": (COMPLETION, {"prompt": TEXT, "structured_outputs": {"regex": "([a-z]{3,9} ){20}"}}),
    "a schema": (
        CHAT,
        {
            "messages": TURNS,
            "logprobs": True,
            "top_logprobs": 2,
            "max_tokens": 300,
            "response_format": {"type": "json_schema", "json_schema": {"name": "rows", "schema": ROWS}},
        },
    ),
    "a call": (CHAT, {"messages": TURNS, "tools": [TOOL], "tool_choice": "required", "n": 2}),
    "tools as the model likes": (CHAT, {"messages": TURNS, "tools": [TOOL], "logprobs": True}),
    "a response": ("/v1/responses", {"input": "Hello.", "top_logprobs": 1}),
    "a response's call": ("/v1/responses", {"input": "Hello.", "tools": [FLAT], "tool_choice": "required"}),
    "a message": ("/v1/messages", {"messages": TURNS, "stop_sequences": ["\n\n\n"]}),
    "a message's call": (
        "/v1/messages",
        {
            "messages": TURNS,
            "tools": [{"name": "weather", "input_schema": CITY}],
            "tool_choice": {"type": "tool", "name": "weather"},
        },
    ),
}


class Event(NamedTuple):
    id: str
    told: dict[str, Any]


async def read(response: httpx.Response, most: int | None = None) -> list[Event]:
    """Its events; the first `most` of them that have an id, and what stands before these."""
    found, id = list[Event](), ""
    async for line in response.aiter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            id = value
        elif name == "data" and value != "[DONE]":
            found.append(Event(id, json.loads(value)))
            assert "error" not in found[-1].told, value
        elif not line:
            if id and most is not None and sum(bool(event.id) for event in found) >= most:
                break
            id = ""
    return found


async def ask(
    url: str, route: str, body: dict[str, Any], last: str = "", most: int | None = None
) -> list[Event]:
    headers = {"Last-Event-ID": last} if last else {}
    async with (
        httpx.AsyncClient(timeout=240) as client,
        client.stream("POST", url + route, json=body, headers=headers) as response,
    ):
        assert response.status_code == 200, await response.aread()
        return await read(response, most)


def told(events: Sequence[Event]) -> dict[str, Any]:
    """All that was told, however it was cut into events, without what names the answer."""
    whole: dict[str, Any] = defaultdict(list)
    for _, event in events:
        for choice in event.get("choices", ()):
            _gather(whole, str(choice["index"]), choice)
        if usage := event.get("usage"):
            whole["usage"] = _counts(usage)
        match event.get("type"):
            case "response.output_text.delta" | "response.function_call_arguments.delta":
                whole["written"] += event["delta"]
                whole["scores"] += event.get("logprobs", [])
            case "response.completed":
                response = event["response"]
                whole["output"] = [_nameless(item) for item in response["output"]]
                whole["usage"] = _counts(response["usage"])
            case "content_block_start":
                whole["blocks"].append(_nameless(event["content_block"]))
            case "content_block_delta":
                whole["written"] += event["delta"].get("text", "") + event["delta"].get("partial_json", "")
            case "message_delta":
                whole["end"].append(event["delta"])
    return dict(whole)


def _gather(whole: dict[str, Any], index: str, choice: dict[str, Any]) -> None:
    delta = choice.get("delta", choice)
    for name in ("text", "content"):
        whole[f"{index} text"] += delta.get(name) or ""
    for call in delta.get("tool_calls", ()):
        whole[f"{index} call {call['index']}"] += call["function"].get("name", "")
        whole[f"{index} arguments {call['index']}"] += call["function"]["arguments"]
    scores = choice.get("logprobs") or {}
    for name, each in scores.items():
        whole[f"{index} {name}"] += each or []
    for step in choice.get("speculation", {}).get("steps", ()):
        whole[f"{index} origins"] += [token["bytes"] for token in step["tokens"]]
    if (prompt := choice.get("prompt_logprobs")) is not None:
        whole[f"{index} prompt"].append(prompt)
    whole[f"{index} end"] += choice["finish_reason"] or ""


def _nameless(told: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in told.items() if name not in ("id", "call_id")}


def _counts(usage: dict[str, Any]) -> dict[str, Any]:
    """Without what depends on who verified and what was cached there."""
    return {name: each for name, each in usage.items() if name.endswith("_tokens") and "cache" not in name}


@pytest.mark.parametrize("case", CASES)
async def test_over_http(complete: Service, case: str) -> None:
    route, fields = CASES[case]
    body: dict[str, Any] = {"stream": True, "max_tokens": 60, "seed": 11, **fields}
    if route == "/v1/responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    if route in (COMPLETION, CHAT):
        body["stream_options"] = {"include_usage": True}
    first, second = complete.urls
    reference = await ask(first, route, body)
    expected = told(reference)
    assert sum(map(len, map(str, expected.values()))) > 100, expected
    places = sum(bool(event.id) for event in reference)
    assert places >= 2
    for most in sorted({1, 2 * places // 3}):
        before = await ask(first, route, body, most=most)
        last = [event.id for event in before if event.id][-1]
        rest = await ask(second, route, body, last)
        assert told(before + rest) == expected, f"after {most} of {places}"


STRUCTURED = generation_pb2.StructuredOutputs(json=json.dumps(ROWS))
WEATHER = generation_pb2.Tool(name="weather", parameters=json.dumps(CITY))
HELLO = generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="user", content="Hello.")])

CALLS: dict[str, dict[str, Any]] = {
    "log-probabilities": {"text": TEXT, "logprobs": 2, "prompt_logprobs": 1},
    "n, echo, stop": {"text": TEXT, "n": 3, "echo": True, "stop": ["\n\n\n"]},
    "the likeliest": {"text": TEXT, "n": 2, "best_of": 4, "max_tokens": 30},
    "a prediction": {"text": TEXT, "temperature": 0, "prediction": TEXT * 3},
    "where tokens came from": {"text": TEXT, "return_speculation": True},
    "a schema": {"chat": HELLO, "structured_outputs": STRUCTURED, "logprobs": 1, "max_tokens": 300},
    "a call": {
        "chat": HELLO,
        "tools": [WEATHER],
        "tool_choice": generation_pb2.ToolChoice(required=True),
        "n": 2,
    },
}


async def told_by(
    responses: AsyncIterator[generation_pb2.GenerateResponse], most: int | None = None
) -> tuple[str, list[generation_pb2.GenerateResponse]]:
    """The answer's id, and the first `most` of what follows."""
    id, found = "", list[generation_pb2.GenerateResponse]()
    async for response in responses:
        if response.HasField("started"):
            id = response.started.id
        else:
            found.append(response)
        if most is not None and len(found) >= most:
            responses.cancel()  # type: ignore[attr-defined]
            break
    return id, found


def gathered(responses: Sequence[generation_pb2.GenerateResponse]) -> dict[str, Any]:
    whole: dict[str, Any] = defaultdict(str)
    for response in responses:
        if response.HasField("completed"):
            end = response.completed
            whole[f"{end.index} end"] = (end.finish_reason, end.usage.completion_tokens, end.tool_calls)
            continue
        delta = response.delta
        whole[f"{delta.index} text"] += delta.text
        whole[f"{delta.index} ids"] += "".join(f"{id} " for id in delta.token_ids)
        for call in delta.tool_calls:
            whole[f"{delta.index} call {call.index}"] += call.name + call.arguments
        for name in ("logprobs", "prompt_logprobs"):
            whole[f"{delta.index} {name}"] += "".join(str(MessageToDict(one)) for one in getattr(delta, name))
        whole[f"{delta.index} origins"] += "".join(f"{one.token.token_id} " for one in delta.step.tokens)
    return dict(whole)


@pytest.mark.parametrize("case", CALLS)
async def test_over_grpc(complete: Service, case: str) -> None:
    request = generation_pb2.GenerateRequest(**{"max_tokens": 60, "seed": 11, **CALLS[case]})
    channels = [grpc.aio.insecure_channel(router.grpc_address) for router in complete.routers]
    first, second = stubs = [generation_pb2_grpc.GenerationStub(channel) for channel in channels]
    try:
        _, reference = await told_by(first.Generate(request))
        expected = gathered(reference)
        for most in sorted({1, 2 * len(reference) // 3}):
            id, before = await told_by(first.Generate(request), most)
            has = [0] * max(request.n, 1)
            for response in before:
                if response.HasField("completed"):
                    has[response.completed.index] += 1
                else:
                    has[response.delta.index] += len(response.delta.token_ids)
            resume = generation_pb2.ResumeRequest(id=id, each_after=has)
            again, rest = await told_by(second.Resume(resume))
            assert again == id
            assert gathered(before + rest) == expected, f"after {most} of {len(reference)}"
    finally:
        assert stubs
        await asyncio.gather(*(channel.close() for channel in channels))
