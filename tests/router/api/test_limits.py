"""A client's time limit reaches its session, and what becomes of a request reaches the client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import grpc
import httpx
import pytest

from outrider.errors import DeadlineExceeded, Overloaded
from outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.router.api.scripted import ScriptedRunner, byte_level, served, steps
from tests.router.api.test_grpc import Connect, connect  # noqa: F401 (a fixture)

TOKENIZER = byte_level()
MODEL = served(TOKENIZER)
IDS = TOKENIZER.encode("a fox", add_special_tokens=False).ids
BODY = {"prompt": "the fox", "max_tokens": 5}

ClientOf = Callable[..., httpx.AsyncClient]


def answering() -> ScriptedRunner:
    return ScriptedRunner(MODEL, lambda request: steps(IDS, 4))


def failing(error: Exception) -> ScriptedRunner:
    return ScriptedRunner(MODEL, lambda request: [error])


@pytest.mark.parametrize(
    ("headers", "stream", "first", "whole"),
    [
        ({}, False, None, None),
        ({"X-Request-Timeout": "30"}, True, 30, 30),
        ({"X-Stainless-Timeout": "600"}, False, None, 601),
        ({"X-Stainless-Read-Timeout": "600.0"}, True, None, None),
    ],
)
async def test_headers_become_the_sessions_limits(
    client_of: ClientOf,
    headers: dict[str, str],
    stream: bool,
    first: float | None,
    whole: float | None,
) -> None:
    runner = answering()
    client = client_of(runner)
    before = asyncio.get_running_loop().time()
    reply = await client.post("/v1/completions", json=BODY | {"stream": stream}, headers=headers)
    assert reply.status_code == 200
    after = asyncio.get_running_loop().time()
    (session,) = runner.requests
    for limit, seconds in ((session.first_token_by, first), (session.deadline, whole)):
        if seconds is None:
            assert limit is None
        else:
            assert limit is not None and before <= limit - seconds <= after


async def test_a_bad_limit_is_refused(client_of: ClientOf) -> None:
    reply = await client_of(answering()).post(
        "/v1/completions", json=BODY, headers={"x-request-timeout": "-3"}
    )
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "x-request-timeout")


async def test_a_refusal_says_when_to_come_back(client_of: ClientOf) -> None:
    client = client_of(failing(Overloaded("full", retry_after=7)))
    for stream in (False, True):
        reply = await client.post("/v1/completions", json=BODY | {"stream": stream})
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "7")


async def test_where_there_is_no_room_nothing_is_done_for_a_request(client_of: ClientOf) -> None:
    runner = answering()
    runner.is_full = True
    reply = await client_of(runner).post("/v1/completions", json=BODY | {"prompt": ""})  # which is no prompt
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "7")
    assert not runner.requests


async def test_what_was_not_finished_in_time_is_told(client_of: ClientOf) -> None:
    reply = await client_of(failing(DeadlineExceeded("too late"))).post("/v1/completions", json=BODY)
    assert (reply.status_code, reply.json()["error"]["type"]) == (504, "timeout_error")


async def test_the_deadline_of_a_call_becomes_the_sessions(connect: Connect) -> None:  # noqa: F811
    runner = answering()
    stub = generation_pb2_grpc.GenerationStub(await connect(runner))
    request = generation_pb2.GenerateRequest(text="the fox", max_tokens=5)
    before = asyncio.get_running_loop().time()
    assert [response async for response in stub.Generate(request, timeout=60)]
    after = asyncio.get_running_loop().time()
    assert [response async for response in stub.Generate(request)]
    limited, free = runner.requests
    assert limited.deadline is not None and limited.deadline == limited.first_token_by
    # gRPC sends a timeout of 10 to 100 s rounded up to tenths of a second.
    assert before - 0.1 <= limited.deadline - 60 <= after + 0.1
    assert free.deadline is None and free.first_token_by is None


async def test_a_refused_call_is_told_when_to_come_back(connect: Connect) -> None:  # noqa: F811
    stub = generation_pb2_grpc.GenerationStub(await connect(failing(Overloaded("full", retry_after=7))))
    call = stub.Generate(generation_pb2.GenerateRequest(text="the fox"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in call:
            pass
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(refused.value.trailing_metadata())["retry-after"] == "7"


@pytest.mark.parametrize(("absent", "status"), [(0, 400), (64, 400), (100, 503)])
async def test_what_only_a_verifier_holds_that_is_away_is_no_fault_of_the_clients(
    client_of: ClientOf, absent: int, status: int
) -> None:
    runner = ScriptedRunner(replace(MODEL, absent_context=absent), lambda request: steps(IDS, 4))
    reply = await client_of(runner).post("/v1/completions", json=BODY | {"max_tokens": 80})
    assert reply.status_code == status
    assert ("a moment ago" in reply.json()["error"]["message"]) is (status == 503)
