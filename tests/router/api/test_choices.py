"""`n`: several answers to a prompt, over HTTP and gRPC, and where their streams are resumed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest

from outrider.errors import DeadlineExceeded, InvalidRequest
from outrider.net.rpc import bind, channel, new_server
from outrider.v1 import generation_pb2, generation_pb2_grpc
from outrider.wire.logprobs import Logprob
from outrider.wire.session import FinishReason
from router.api import schema
from router.api.grpc_generation import add_generation_service
from router.api.intake import Intake
from router.api.text_rules import check_details
from router.api.validation import choice_seed
from router.metrics import Metrics
from router.requests import GenerationRequest, SessionEnded, SessionEvent, TokensCommitted
from tests.router.api.scripted import ScriptedRunner, byte_level, served, steps

TOKENIZER = byte_level()
MODEL = served(TOKENIZER)
Request = generation_pb2.GenerateRequest

ClientOf = Callable[..., httpx.AsyncClient]


def by_seed(request: GenerationRequest) -> list[SessionEvent]:
    seed = request.params.sampling.seed % 100
    return steps([60 + seed, 61 + seed, *request.params.prompt], 2)


def text(seed: int, prompt: list[int]) -> str:
    return str(TOKENIZER.decode([60 + seed % 100, 61 + seed % 100, *prompt]))


async def events(client: httpx.AsyncClient, fields: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(id, chunk) of each."""
    body = (await client.post("/v1/completions", json={**fields, "stream": True})).text
    blocks = [
        dict(line.split(": ", 1) for line in block.split("\n")) for block in body.split("\n\n") if block
    ]
    return [(block.get("id", ""), json.loads(block["data"])) for block in blocks if block["data"] != "[DONE]"]


def test_the_seed_of_an_answer_is_the_request_s_and_its_index() -> None:
    assert [choice_seed(7, index) for index in range(3)] == [7, 8, 9]
    assert choice_seed(2**64 - 1, 2) == 1


async def test_each_answer_has_its_own_seed_and_the_prompt_counts_once(client_of: ClientOf) -> None:
    client = client_of(runner := ScriptedRunner(MODEL, by_seed))
    fields = {"prompt": [[70, 71], [75]], "n": 3, "seed": 5, "max_tokens": 9}
    whole = (await client.post("/v1/completions", json=fields)).json()
    expected = [text(seed, prompt) for prompt in ([70, 71], [75]) for seed in (5, 6, 7)]
    assert [choice["text"] for choice in whole["choices"]] == expected
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3, 4, 5]
    assert whole["seed"] == 5
    usage = whole["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 3 * (4 + 3))
    assert usage["prompt_tokens_details"] == {"cached_tokens": 6}  # of the first answer to each prompt
    for request in runner.requests[:6]:
        alone = {**fields, "prompt": list(request.params.prompt), "n": 1}
        seed = request.params.sampling.seed
        answer = (await client.post("/v1/completions", json=alone | {"seed": seed})).json()
        assert answer["choices"][0]["text"] == text(seed, list(request.params.prompt))

    streamed = [""] * 6
    options = {"stream_options": {"include_usage": True}}
    *chunks, (_, last) = await events(client, fields | options)
    for _, chunk in chunks:
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["text"]
    assert streamed == expected
    assert last["usage"] == usage


async def test_a_chat_has_several_answers_each_opened_with_its_role(client_of: ClientOf) -> None:
    client = client_of(ScriptedRunner(MODEL, by_seed))
    fields = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "seed": 1}
    whole = (await client.post("/v1/chat/completions", json=fields)).json()
    assert len({choice["message"]["content"] for choice in whole["choices"]}) == 2
    body = (await client.post("/v1/chat/completions", json={**fields, "stream": True})).text
    told = [json.loads(line[6:]) for line in body.split("\n") if line.startswith("data: {")]
    opened = [one["choices"][0]["index"] for one in told if one["choices"][0]["delta"].get("role")]
    assert opened == [0, 1]
    first, second = body.split("\n\n")[:2]
    assert "id:" not in first and "id:" in second, "who goes on after an event has all that come before it"


async def test_a_stream_of_several_answers_goes_on_at_another_router(client_of: ClientOf) -> None:
    logs: Any = {}
    fields = {"prompt": [70, 71], "n": 3, "seed": 5, "max_tokens": 9}
    told = await events(client_of(ScriptedRunner(MODEL, by_seed, logs)), fields)
    for index in range(len(told)):
        other = client_of(ScriptedRunner(MODEL, by_seed, logs))
        headers = {"Last-Event-ID": told[index][0]}
        body = (await other.post("/v1/completions", json={**fields, "stream": True}, headers=headers)).text
        rest = [json.loads(line[6:]) for line in body.split("\n") if line.startswith("data: {")]
        pieces = [""] * 3
        for chunk in [chunk for _, chunk in told[: index + 1]] + rest:
            pieces[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert pieces == [text(seed, [70, 71]) for seed in (5, 6, 7)]


@asynccontextmanager
async def generation_of(runner: ScriptedRunner) -> AsyncIterator[Any]:
    server = new_server()
    add_generation_service(server, Intake(runner, lambda below: 0), Metrics())
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    async with channel(address) as connection:
        yield generation_pb2_grpc.GenerationStub(connection)
    await server.stop(0)


@pytest.fixture
async def stub() -> AsyncIterator[Any]:
    async with generation_of(ScriptedRunner(MODEL, by_seed)) as stub:
        yield stub


async def test_grpc_has_them_too(stub: Any) -> None:
    request = Request(token_ids=generation_pb2.TokenIds(ids=[70, 71]), n=3, seed=5, max_tokens=9)
    started, *others = [response async for response in stub.Generate(request)]
    assert started.started.seed == 5
    pieces, ends = [""] * 3, [0] * 3
    for response in others:
        if response.HasField("delta"):
            pieces[response.delta.index] += response.delta.text
        else:
            ends[response.completed.index] += response.completed.usage.completion_tokens
    assert pieces == [text(seed, [70, 71]) for seed in (5, 6, 7)]
    assert ends == [4, 4, 4] and others[-1].HasField("completed")

    resume = generation_pb2.ResumeRequest(id=started.started.id, each_after=[2, 5, 0])
    rest = [response async for response in stub.Resume(resume)]
    ids: list[list[int]] = [[], [], []]
    for response in rest:
        if response.HasField("delta"):
            ids[response.delta.index] += response.delta.token_ids
    assert ids == [[70, 71], [], [67, 68, 70, 71]]
    again = [one async for one in stub.Resume(generation_pb2.ResumeRequest(id=started.started.id))]
    deltas = [one.delta for one in again if one.HasField("delta")]
    assert ["".join(one.text for one in deltas if one.index == index) for index in range(3)] == pieces
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        _ = [one async for one in stub.Resume(generation_pb2.ResumeRequest(id=started.started.id, after=1))]
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_of_several_answers_the_likeliest_are_told(client_of: ClientOf) -> None:
    def scored(request: GenerationRequest) -> list[SessionEvent]:
        seed = request.params.sampling.seed
        told = tuple(Logprob(-float((seed * 7) % 5)) for _ in range(2))
        return [
            TokensCommitted((60 + seed, 61 + seed), 0, 0, logprobs=told),
            SessionEnded(FinishReason.LENGTH),
        ]

    runner = ScriptedRunner(MODEL, scored)
    client = client_of(runner)
    fields = {"prompt": [[70, 71], [75]], "n": 2, "best_of": 5, "seed": 0, "max_tokens": 2}
    whole = (await client.post("/v1/completions", json=fields)).json()
    texts = [str(TOKENIZER.decode([60 + seed, 61 + seed])) for seed in (0, 3)]  # seeds 0 to 4: 0 2 4 1 3
    assert [choice["text"] for choice in whole["choices"]] == texts * 2
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in whole["choices"])
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (3, 20)
    assert len(runner.requests) == 10
    told = (await client.post("/v1/completions", json=fields | {"logprobs": 0})).json()["choices"][1]
    assert told["logprobs"]["token_logprobs"] == [-1.0, -1.0]
    turns = [{"role": "user", "content": "hi"}]
    chat = {"messages": turns, "best_of": 3, "seed": 1, "max_tokens": 2}
    (choice,) = (await client.post("/v1/chat/completions", json=chat)).json()["choices"]
    assert choice["message"]["content"] == texts[1] and choice["logprobs"] is None
    for other, message in (
        ({"best_of": 1}, "best_of must be at least n (2), not 1"),
        ({"best_of": 65}, "best_of must be in [1, 64], not 65"),
        ({"prompt": ["a"] * 3, "best_of": 64}, "best_of must be at most 42 with 3 prompts, not 64"),
        ({"prompt_logprobs": 1}, "n and best_of must be 1 with prompt_logprobs"),
    ):
        refused = await client.post("/v1/completions", json=fields | other)
        assert refused.status_code == 400 and message in refused.text, refused.text


def likelier(request: GenerationRequest) -> list[SessionEvent]:
    """Steps of two tokens; of the seeds 0 to 4 those likeliest are 0 and 3, then 1."""
    seed = request.params.sampling.seed
    told = (Logprob(-float((seed * 7) % 5)),) * 2
    texts = [(60 + seed + at, 61 + seed + at) for at in (0, 1, 2)]
    return [*(TokensCommitted(two, 0, 0, logprobs=told) for two in texts), SessionEnded(FinishReason.LENGTH)]


BEST = {"prompt": [[70, 71], [75]], "n": 2, "best_of": 5, "seed": 0, "max_tokens": 6}


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_the_likeliest_are_streamed_once_all_are_there(
    client_of: ClientOf, logprobs: int | None
) -> None:
    logs: Any = {}
    client = client_of(runner := ScriptedRunner(MODEL, likelier, logs))
    fields = {**BEST, "logprobs": logprobs}
    whole = (await client.post("/v1/completions", json=fields)).json()
    expected = [choice["text"] for choice in whole["choices"]]
    *chunks, (_, last) = told = await events(client, fields | {"stream_options": {"include_usage": True}})
    assert len(runner.requests) == 20
    assert [chunk["choices"][0]["index"] for _, chunk in chunks] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert last["usage"] == whole["usage"] and last["usage"]["completion_tokens"] == 60
    for index, (id, _) in enumerate(chunks):
        other = client_of(ScriptedRunner(MODEL, likelier, logs))
        response = await other.post(
            "/v1/completions", json={**fields, "stream": True}, headers={"Last-Event-ID": id}
        )
        rest = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]
        pieces, scores = [""] * 4, [0] * 4
        for chunk in [chunk for _, chunk in chunks[: index + 1]] + rest[:-1]:
            (choice,) = chunk["choices"]
            pieces[choice["index"]] += choice["text"]
            scores[choice["index"]] += len((choice["logprobs"] or {"tokens": []})["tokens"])
        assert pieces == expected and rest[-1]["usage"] == whole["usage"]
        assert scores == ([0] * 4 if logprobs is None else [6] * 4)
    session = told[0][0].split(":")[0]
    amid = await client.get(f"/v1/sessions/{session}/events", params={"after": "3,5,7,1"})
    rest = [json.loads(line[6:]) for line in amid.text.split("\n") if line.startswith("data: {")]
    pieces = [""] * 4
    for chunk in rest[:-1]:
        pieces[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert pieces == [expected[0][3:], expected[1][5:], "", expected[3][1:]]
    wrong = await client.get(f"/v1/sessions/{session}/events", params={"after": "1,1,1,1,1,1,1,1,1,1"})
    assert wrong.status_code == 400 and "after must have 4 numbers" in wrong.text


async def test_the_likeliest_are_not_told_if_the_time_is_over_before_all_are_there(
    client_of: ClientOf,
) -> None:
    def late(request: GenerationRequest) -> list[Any]:
        some = likelier(request)
        if request.params.sampling.seed == 4:
            return [some[0], DeadlineExceeded("the time that the client gave is over")]
        return some

    client = client_of(ScriptedRunner(MODEL, late))
    for stream in (False, True):
        response = await client.post("/v1/completions", json={**BEST, "stream": stream})
        assert response.status_code == 504 and "time that the client gave" in response.text


async def test_grpc_has_the_likeliest_too() -> None:
    async with generation_of(ScriptedRunner(MODEL, likelier)) as stub:
        ids = generation_pb2.TokenIds(ids=[70, 71])
        request = Request(token_ids=ids, n=2, best_of=5, seed=0, max_tokens=6)
        started, *told = [response async for response in stub.Generate(request)]
        texts, lost = [""] * 2, [0] * 2
        for one in told:
            if one.HasField("delta"):
                texts[one.delta.index] += one.delta.text
                assert not one.delta.logprobs
            else:
                lost[one.completed.index] += one.completed.untold_tokens
                assert one.completed.usage.completion_tokens == 6
        assert texts == [
            str(TOKENIZER.decode([60 + s, 61 + s, 61 + s, 62 + s, 62 + s, 63 + s])) for s in (0, 3)
        ]
        assert lost == [0, 18]
        resume = generation_pb2.ResumeRequest(id=started.started.id, each_after=[5, 7])
        rest = [one.delta async for one in stub.Resume(resume) if one.HasField("delta")]
        assert [(one.index, list(one.token_ids)) for one in rest] == [(0, [63])]
        resume = generation_pb2.ResumeRequest(id=started.started.id)
        again = [one.delta async for one in stub.Resume(resume) if one.HasField("delta")]
        assert ["".join(one.text for one in again if one.index == index) for index in range(2)] == texts


def test_of_several_answers_so_many_numbers_are_told() -> None:
    plain = schema.parse(schema.CompletionRequest, {"prompt": "a"})
    guesses = schema.parse(schema.CompletionRequest, {"prompt": "a", "return_speculation": True})
    check_details(plain, None, [10**6] * 128)
    check_details(plain, 20, [10**6])  # one answer's are bounded by the context
    check_details(plain, 0, [2**14] * 64)
    for body, logprobs, most_tokens in ((plain, 20, [8192] * 64), (guesses, None, [2**14] * 2)):
        with pytest.raises(InvalidRequest, match="several have at most 1048576"):
            check_details(body, logprobs, most_tokens)


async def test_others_have_their_turn_between_the_beginnings_of_two_answers(client_of: ClientOf) -> None:
    turns, began = 0, []

    async def counting() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    class Noting(ScriptedRunner):
        def run(self, request: GenerationRequest, answer: bytes = b"") -> Any:
            began.append(turns)
            return super().run(request, answer)

    others = asyncio.create_task(counting())
    asked = {"prompt": [5], "n": 64, "max_tokens": 4}
    response = await client_of(Noting(MODEL, by_seed)).post("/v1/completions", json=asked)
    others.cancel()
    assert response.status_code == 200 and len(response.json()["choices"]) == 64
    assert len(set(began)) == len(began) == 64
