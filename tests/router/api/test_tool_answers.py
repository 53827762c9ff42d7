"""Answers that call tools: whole, cut off, in a stream, and in one that another router goes on with."""

from __future__ import annotations

import json
from typing import Any

import httpx

from outrider.v1 import generation_pb2, generation_pb2_grpc
from outrider.wire.session import FinishReason
from router.api.reading import Formats
from router.requests import SessionEnded
from router.tool_formats import HERMES, JSON, LLAMA3, MISTRAL, MISTRAL_ARGS, QWEN3_CODER
from tests.router.api.scripted import Log, Logs, ScriptedRunner, served, steps
from tests.router.api.test_grpc import Connect, connect  # noqa: F401 (a fixture)
from tests.router.api.test_http import ClientOf
from tests.router.api.test_tools import CHAT, MODEL, TOKENIZER, TOLD, TOOLS, A, B, scripted_files, written

SAID = "Let me see.\n" + written(HERMES, ("weather", A), ("clock", B))
TWO = [("weather", A), ("clock", B)]
BODY = {"messages": CHAT, "tools": TOOLS}


def saying(
    text: str, width: int = 3, logs: Logs | None = None, forgets: int = 0, model: Any = MODEL
) -> ScriptedRunner:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    script = [*steps(ids, width)[:-1], SessionEnded(FinishReason.STOP)]
    return ScriptedRunner(model, lambda request: script, logs, forgets)


def hermes(client_of: ClientOf, runner: ScriptedRunner) -> httpx.AsyncClient:
    return client_of(runner, formats=Formats("hermes"))


async def test_a_whole_answer(client_of: ClientOf) -> None:
    client = hermes(client_of, saying(SAID))
    answer = (await client.post("/v1/chat/completions", json={**BODY, "n": 2})).json()
    ids = set()
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert message["content"] == "Let me see."
        calls = message["tool_calls"]
        assert [(call["function"]["name"], call["function"]["arguments"]) for call in calls] == TWO
        assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
        ids |= {call["id"] for call in calls}
    assert len(ids) == 4
    only = hermes(client_of, saying(written(HERMES, *TWO)))
    one = (await only.post("/v1/chat/completions", json={**BODY, "parallel_tool_calls": False})).json()
    message = one["choices"][0]["message"]
    assert message["content"] is None and len(message["tool_calls"]) == 1
    none = (await only.post("/v1/chat/completions", json={**BODY, "tool_choice": "none"})).json()
    assert none["choices"][0]["message"]["content"] == written(HERMES, *TWO)
    assert none["choices"][0]["finish_reason"] == "stop" and "tool_calls" not in none["choices"][0]["message"]


async def test_a_call_that_is_cut_off(client_of: ClientOf) -> None:
    ids = TOKENIZER.encode(SAID, add_special_tokens=False).ids[:-20]
    client = hermes(client_of, ScriptedRunner(MODEL, lambda request: steps(ids, 4)))
    (choice,) = (await client.post("/v1/chat/completions", json=BODY)).json()["choices"]
    assert choice["finish_reason"] == "length" and len(choice["message"]["tool_calls"]) >= 1


async def test_special_tokens_mark_calls(client_of: ClientOf) -> None:
    for form in (MISTRAL, MISTRAL_ARGS, QWEN3_CODER, LLAMA3, JSON):
        opening = form.opening if form is LLAMA3 else ""
        client = client_of(saying(opening + written(form, *TWO)), formats=Formats(form.name))
        (choice,) = (await client.post("/v1/chat/completions", json=BODY)).json()["choices"]
        calls = choice["message"]["tool_calls"]
        assert [(call["function"]["name"], call["function"]["arguments"]) for call in calls] == TWO
        assert {len(call["id"]) for call in calls} == {9 if form in (MISTRAL, MISTRAL_ARGS) else 29}


def joined(told: list[Any]) -> tuple[str, list[tuple[str, str, str]], str]:
    """The text, the calls and the reason of a stream's chunks."""
    text, calls, reason = "", [], ""
    for chunk in told:
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            reason = choice["finish_reason"] or reason
            for call in choice["delta"].get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(calls)
                    calls.append((call["id"], call["function"]["name"], ""))
                id, name, arguments = calls[call["index"]]
                calls[call["index"]] = (id, name, arguments + call["function"]["arguments"])
    return text, calls, reason


def copied(logs: Logs) -> Logs:
    return {id: Log(log.recalled, list(log.events)) for id, log in logs.items()}


async def test_a_stream_and_its_resumption_at_another_router(client_of: ClientOf) -> None:
    logs: Logs = {}
    first = hermes(client_of, saying(SAID, 2, logs))
    response = await first.post("/v1/chat/completions", json={**BODY, "stream": True})
    events = [
        dict(line.split(": ", 1) for line in event.split("\n"))
        for event in response.text.strip().split("\n\n")
    ]
    told = [json.loads(event["data"]) for event in events[:-1]]
    text, calls, reason = joined(told)
    assert (text, [call[1:] for call in calls], reason) == ("Let me see.", TWO, "tool_calls")
    assert len({call[0] for call in calls}) == 2
    pieces = [
        call
        for chunk in told
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", ())
    ]
    assert len(pieces) > 6  # arguments come as they are written
    for cut, event in list(enumerate(events[:-1]))[::5]:
        # The other router's steps are others, and it lacks the last ones of the log.
        again = hermes(client_of, saying(SAID, 5, copied(logs), forgets=3))
        headers = {"last-event-id": event["id"]}
        rest = await again.post("/v1/chat/completions", json={**BODY, "stream": True}, headers=headers)
        more = [
            json.loads(line.removeprefix("data: "))
            for line in rest.text.split("\n")
            if line.startswith("data: {")
        ]
        assert joined(told[: cut + 1] + more) == (text, calls, reason)


async def test_tokenize_counts_tools(client_of: ClientOf) -> None:
    model = served(TOKENIZER, max_context=4096)
    object.__setattr__(model, "tokenizer", scripted_files(TOLD))
    client = client_of(ScriptedRunner(model, lambda request: ()))
    plain, more = [
        (await client.post("/tokenize", json={"messages": CHAT, **fields})).json()["count"]
        for fields in ({}, {"tools": TOOLS})
    ]
    assert more > plain


def put_together(told: list[Any]) -> list[tuple[str, str, str]]:
    """The calls that responses over gRPC tell: id, name and arguments."""
    calls: list[tuple[str, str, str]] = []
    for delta in [response.delta for response in told if response.HasField("delta")]:
        assert not delta.text
        for call in delta.tool_calls:
            if call.id:
                calls.append((call.id, call.name, ""))
            id, name, arguments = calls[call.index]
            calls[call.index] = (id, name, arguments + call.arguments)
    return calls


async def test_calls_over_grpc_and_after_a_break(connect: Connect) -> None:  # noqa: F811
    channel = await connect(saying(written(JSON, *TWO), 2))
    stub = generation_pb2_grpc.GenerationStub(channel)
    request = generation_pb2.GenerateRequest(
        chat=generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="user", content="hi")]),
        tools=[generation_pb2.Tool(name="weather"), generation_pb2.Tool(name="clock")],
    )
    told = [response async for response in stub.Generate(request)]
    calls = put_together(told)
    assert [call[1:] for call in calls] == TWO
    assert told[-1].completed.tool_calls == 2
    assert told[-1].completed.finish_reason == FinishReason.STOP
    has = 0
    for count, response in enumerate(told[1:-1], 2):
        has += len(response.delta.token_ids)
        if count % 7:
            continue
        resume = generation_pb2.ResumeRequest(id=told[0].started.id, after=has)
        rest = [response async for response in stub.Resume(resume)]
        assert put_together(told[:count] + rest) == calls
