"""How long a client waits, as headers say it, and what it has when that is over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest

from outrider.errors import DeadlineExceeded, InvalidRequest, NoneInTime
from outrider.v1 import generation_pb2, generation_pb2_grpc
from router.api.deadline import TimeLimits, time_limits
from router.requests import GenerationRequest
from tests.router.api.scripted import Logs, ScriptedRunner, byte_level, served, steps, until
from tests.router.api.test_grpc import Connect, connect  # noqa: F401  # a fixture

NOW = 1000.0

ClientOf = Callable[..., httpx.AsyncClient]


def limits(streamed: bool = False, **headers: str) -> TimeLimits:
    return time_limits({name.replace("_", "-"): value for name, value in headers.items()}, streamed, NOW)


def test_without_a_header_there_is_no_limit() -> None:
    assert limits() == TimeLimits(None, None)


def test_ours_is_for_the_whole_answer() -> None:
    for streamed in (False, True):
        assert limits(streamed, x_request_timeout="2.5") == TimeLimits(1002.5, 1002.5)


@pytest.mark.parametrize("name", ["x_stainless_timeout", "x_stainless_read_timeout"])
def test_an_sdk_ends_its_request_itself(name: str) -> None:
    """It is neither refused early nor ended before that."""
    assert limits(False, **{name: "600.0"}) == TimeLimits(None, 1601.0)
    assert limits(True, **{name: "600"}) == TimeLimits(None, None)


def test_the_shortest_counts() -> None:
    both = {"x_request_timeout": "30", "x_stainless_read_timeout": "10"}
    assert limits(True, **both) == TimeLimits(1030.0, 1030.0)
    assert limits(False, **both) == TimeLimits(1030.0, 1011.0)


@pytest.mark.parametrize("value", ["soon", "", "0", "-1", "nan", "9" * 65])
def test_a_bad_one_of_ours_is_refused_by_name_and_an_sdks_is_ignored(value: str) -> None:
    with pytest.raises(InvalidRequest, match="x-request-timeout must be a number of seconds"):
        limits(x_request_timeout=value)
    assert limits(x_stainless_timeout=value) == TimeLimits(None, None)


def test_without_end_is_no_limit() -> None:
    assert limits(x_request_timeout="inf") == TimeLimits(None, None)


TEXT = "naïve 😀 fox STOP there"
TOKENIZER = byte_level()
IDS = TOKENIZER.encode(TEXT, add_special_tokens=False).ids
ASKED = {"prompt": "the fox", "max_tokens": 40}


def cut(request: GenerationRequest) -> list[Any]:
    """Two steps, then a wait for a verifier, and the end of the client's time. Who resumes it gets all."""
    first, second, *_ = steps(IDS, 3)
    return [first, second, None, DeadlineExceeded("too late")]


async def test_a_whole_answer_keeps_the_text_that_it_has(client_of: ClientOf) -> None:
    runner = ScriptedRunner(served(TOKENIZER), cut)
    runner.go_on.set()
    client = client_of(runner)
    reply = await client.post("/v1/completions", json=ASKED)
    body = reply.json()
    (choice,) = body["choices"]
    assert (reply.status_code, choice["finish_reason"]) == (200, "abort")
    assert choice["text"] == TOKENIZER.decode(IDS[:6]).rstrip("\ufffd") != ""
    assert body["usage"]["completion_tokens"] == 6
    chat = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
    assert chat.json()["choices"][0]["message"]["content"] == choice["text"]
    assert chat.json()["choices"][0]["finish_reason"] == "abort"


async def test_a_stream_that_has_begun_ends_with_a_reason_and_can_go_on(client_of: ClientOf) -> None:
    logs: Logs = {}
    runner = ScriptedRunner(served(TOKENIZER), cut, logs)
    runner.go_on.set()
    streamed = {**ASKED, "stream": True, "stream_options": {"include_usage": True}}
    told = (await client_of(runner).post("/v1/completions", json=streamed)).text.strip().split("\n\n")
    assert told[-1] == "data: [DONE]"
    end, usage = (json.loads(event.removeprefix("data: ")) for event in told[-3:-1])  # neither has an id
    assert (end["choices"][0]["text"], end["choices"][0]["finish_reason"]) == ("", "abort")
    assert usage["usage"]["completion_tokens"] == 6
    session, _, after = told[-4].removeprefix("id: ").partition("\n")[0].partition(":")
    other = client_of(ScriptedRunner(served(TOKENIZER), lambda request: steps(IDS, 3), logs))
    rest = await other.get(f"/v1/sessions/{session}/events", params={"after": after})
    assert text_of(told[:-3]) + text_of(rest.text.strip().split("\n\n")) == TEXT


def text_of(events: list[str]) -> str:
    chunks = [json.loads(event.rpartition("data: ")[2]) for event in events if "[DONE]" not in event]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("error", [DeadlineExceeded("too late"), NoneInTime("no target worker")])
async def test_of_several_prompts_none_takes_the_others_text(
    client_of: ClientOf, error: DeadlineExceeded
) -> None:
    """One has ended, one has begun, and one waits for its first token."""

    def script(request: GenerationRequest) -> list[Any]:
        match request.params.prompt[0]:
            case 70:
                return steps(IDS, 3)
            case 71:
                return cut(request)
        return [None, error]

    runner = ScriptedRunner(served(TOKENIZER), script)
    client = client_of(runner)
    several = {**ASKED, "prompt": [[70], [71], [72]]}
    asked = asyncio.create_task(client.post("/v1/completions", json=several))
    await until(lambda: runner.open == 2 and runner.waiting.is_set())
    runner.go_on.set()
    choices = (await asked).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["length", "abort", "abort"]
    assert [choice["text"] == "" for choice in choices] == [False, False, True]
    nothing = await client.post("/v1/completions", json={**ASKED, "prompt": [[72], [73]]})
    assert nothing.status_code == error.http_status


async def test_a_call_has_its_text_before_its_status(connect: Connect) -> None:  # noqa: F811
    logs: Logs = {}
    runner = ScriptedRunner(served(TOKENIZER), cut, logs)
    runner.go_on.set()
    stub = generation_pb2_grpc.GenerationStub(await connect(runner))
    text, ids, call = "", 0, stub.Generate(generation_pb2.GenerateRequest(text="the fox", max_tokens=40))
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        async for response in call:
            assert response.WhichOneof("event") != "completed"
            text, ids = text + response.delta.text, ids + len(response.delta.token_ids)
    assert (ended.value.code(), ended.value.details()) == (grpc.StatusCode.DEADLINE_EXCEEDED, "too late")
    assert ids == 6
    other = await connect(ScriptedRunner(served(TOKENIZER), lambda request: steps(IDS, 3), logs))
    (session,) = logs
    rest = generation_pb2_grpc.GenerationStub(other).Resume(
        generation_pb2.ResumeRequest(id=session.hex(), after=ids)
    )
    assert text + "".join([response.delta.text async for response in rest]) == TEXT


async def test_other_providers_shapes_say_it_too(client_of: ClientOf) -> None:
    runner = ScriptedRunner(served(TOKENIZER), cut)
    runner.go_on.set()
    client = client_of(runner)
    turns = [{"role": "user", "content": "hi"}]
    message = (await client.post("/v1/messages", json={"messages": turns, "max_tokens": 40})).json()
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("abort", 6)
    response = (await client.post("/v1/responses", json={"input": "hi"})).json()
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "abort"})
    assert response["output"][0]["content"][0]["text"] == message["content"][0]["text"] != ""
    for path, body in (("messages", {"messages": turns, "max_tokens": 40}), ("responses", {"input": "hi"})):
        told = (await client.post(f"/v1/{path}", json={**body, "stream": True})).text
        assert '"abort"' in told and "timeout_error" not in told
