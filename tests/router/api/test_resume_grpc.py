"""Generation/Resume over a real channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from outrider.v1 import generation_pb2, generation_pb2_grpc
from router.metrics import Metrics
from tests.router.api.scripted import Logs, ScriptedRunner, byte_level, served, steps
from tests.router.api.test_grpc import Connect, connect  # noqa: F401 (a fixture)

TOKENIZER = byte_level()
MODEL = served(TOKENIZER)
# It ends in the middle of a character: the last text comes with the end, and with no token.
IDS = [*TOKENIZER.encode("naïve 😀 fox STOP th", add_special_tokens=False).ids, TOKENIZER.token_to_id("ð")]
REQUEST = generation_pb2.GenerateRequest(text="the fox", max_tokens=40)


def answering(logs: Logs, width: int = 3, **settings: Any) -> ScriptedRunner:
    return ScriptedRunner(MODEL, lambda request: steps(IDS, width), logs, **settings)


async def generated(
    channel: grpc.aio.Channel, request: generation_pb2.GenerateRequest = REQUEST
) -> list[generation_pb2.GenerateResponse]:
    return [response async for response in generation_pb2_grpc.GenerationStub(channel).Generate(request)]


async def resumed(channel: grpc.aio.Channel, id: str, after: int) -> list[generation_pb2.GenerateResponse]:
    request = generation_pb2.ResumeRequest(id=id, after=after)
    return [response async for response in generation_pb2_grpc.GenerationStub(channel).Resume(request)]


def position_of(deltas: list[generation_pb2.GenerateResponse]) -> int:
    """Returns the position as the protocol says that a client counts it."""
    return sum(len(response.delta.token_ids) or 1 for response in deltas)


@pytest.mark.parametrize("stop", [[], ["STOP"], ["\ufffd"]])
async def test_what_is_missing_comes_and_nothing_twice(
    connect: Callable[..., Any],  # noqa: F811
    stop: list[str],
) -> None:
    logs: Logs = {}
    request = generation_pb2.GenerateRequest(text="the fox", max_tokens=40, stop=stop)
    started, *deltas, completed = await generated(await connect(answering(logs)), request)
    assert (deltas[-1].delta.text, len(deltas[-1].delta.token_ids)) == ("\ufffd", 0) or stop
    for forgets in (0, 2, 100):
        other = await connect(answering(logs, forgets=forgets))
        for count in range(len(deltas) + 1):
            begun, *rest, end = await resumed(other, started.started.id, position_of(deltas[:count]))
            assert (begun, deltas[:count] + rest, end) == (started, deltas, completed)


async def test_other_steps_give_the_same_tokens_and_text(connect: Connect) -> None:  # noqa: F811
    logs: Logs = {}
    started, *deltas, _ = await generated(await connect(answering(logs, 1)))
    for width in (2, 5):
        other = await connect(answering(logs, width, forgets=100))
        for count in range(len(deltas) + 1):
            _, *rest, end = await resumed(other, started.started.id, count)
            tokens = [id for response in deltas[:count] + rest for id in response.delta.token_ids]
            text = "".join(response.delta.text for response in deltas[:count] + rest)
            assert (tokens, text) == (IDS, TOKENIZER.decode(IDS))
            assert end.completed.usage.completion_tokens == len(IDS)


@pytest.mark.parametrize(
    ("id", "after", "code", "details"),
    [
        ("0" * 32, 0, grpc.StatusCode.NOT_FOUND, "no session with this id is known"),
        ("", 0, grpc.StatusCode.INVALID_ARGUMENT, "id must be that of an answer"),
        ("7", 0, grpc.StatusCode.INVALID_ARGUMENT, "id must be that of an answer"),
        ("it", 42, grpc.StatusCode.INVALID_ARGUMENT, "after must be at most 41 here, not 42"),
    ],
)
async def test_refusals(
    connect: Connect,  # noqa: F811
    id: str,
    after: int,
    code: grpc.StatusCode,
    details: str,
) -> None:
    channel = await connect(answering({}))
    started = (await generated(channel))[0].started
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await resumed(channel, started.id if id == "it" else id, after)
    assert refused.value.code() is code and details in (refused.value.details() or "")


async def test_an_absent_store_and_a_session_that_went_elsewhere(connect: Connect) -> None:  # noqa: F811
    logs: Logs = {}
    runner = ScriptedRunner(MODEL, lambda request: [*steps(IDS[:3])[:-1], None, *steps(IDS)[3:]], logs)
    channel = await connect(runner)
    call = generation_pb2_grpc.GenerationStub(channel).Generate(REQUEST)
    left = aiter(call)
    started = (await anext(left)).started
    await runner.waiting.wait()
    other = answering(logs, 1)
    rest = await resumed(await connect(other), started.id, 2)
    assert rest[-1].completed.usage.completion_tokens == len(IDS)
    runner.go_on.set()
    with pytest.raises(grpc.aio.AioRpcError) as left_behind:
        async for _ in left:
            pass
    assert left_behind.value.code() is grpc.StatusCode.ABORTED
    other.store_is_away = True
    with pytest.raises(grpc.aio.AioRpcError) as away:
        await resumed(await connect(other), started.id, 2)
    assert away.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_several_prompts_are_for_http(connect: Connect, client_of: Any, metrics: Metrics) -> None:  # noqa: F811
    logs: Logs = {}
    body = {"prompt": ["a", "b"]}
    id = (await client_of(answering(logs)).post("/v1/completions", json=body)).json()["id"]
    with pytest.raises(grpc.aio.AioRpcError, match="has 2 prompts: resume it over HTTP") as refused:
        await resumed(await connect(answering(logs)), id, 0)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_answer_can_change_its_transport(connect: Connect, client_of: Any) -> None:  # noqa: F811
    logs: Logs = {}
    started, *deltas, _ = await generated(await connect(answering(logs)))
    stream = (await client_of(answering(logs)).get(f"/v1/sessions/{started.started.id}/events")).text
    assert f'"id":"cmpl-{started.started.id}"' in stream
    again, *same, _ = await resumed(await connect(answering(logs)), f"cmpl-{started.started.id}", 0)
    assert (again, same) == (started, deltas)
