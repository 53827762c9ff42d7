from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from outrider.errors import Overloaded, Unavailable
from router.api.body import Bodies
from router.metrics import Metrics
from router.requests import GenerationRequest, SessionEvent
from tests.router.api.conftest import DRAWN
from tests.router.api.scripted import ScriptedRunner, byte_level, served, steps

TOKENIZER = byte_level()
MODEL = served(TOKENIZER)
TEXT = "naïve 😀 fox STOP there"
IDS = TOKENIZER.encode(TEXT, add_special_tokens=False).ids
PROMPT = len(TOKENIZER.encode("the fox").ids)
CHAT_PROMPT = len(TOKENIZER.encode("<s>user: hi\nassistant:", add_special_tokens=False).ids)

ClientOf = Callable[..., httpx.AsyncClient]


def answering(width: int = 4) -> ScriptedRunner:
    return ScriptedRunner(MODEL, lambda request: steps(IDS, width))


def speculation(width: int) -> dict[str, Any]:
    count, last = -(-len(IDS) // width), len(IDS) % width or width
    histogram = [0] * width
    histogram[width - 1] += count - 1
    histogram[last - 1] += 1
    accepted = (count - 1) * (width - 1) + last - 1
    return {
        "mean_acceptance_length": 1 + accepted / count,
        "draft_acceptance_rate": accepted / (count * (width - 1)),
        "acceptance_histogram": histogram,
        "num_spec_steps": count,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": count * (width - 1),
    }


def usage(prompt: int, completion: int = len(IDS)) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


async def events(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in response.headers
    *chunks, done, end = (await response.aread()).decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(chunk.rpartition("data: ")[2]) for chunk in chunks]


async def test_a_completion(client_of: ClientOf) -> None:
    response = await client_of(answering()).post("/v1/completions", json={"prompt": "the fox"})
    body = response.json()
    assert body.pop("id").startswith("cmpl-")
    assert body == {
        "object": "text_completion",
        "created": 1234,
        "model": "demo",
        "seed": DRAWN,
        "choices": [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "length"}],
        "usage": usage(PROMPT),
        "metrics": {"speculative_decoding": speculation(4), "numerics_changes": 0},
    }


async def test_a_chat(client_of: ClientOf) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "seed": 2**64 - 1, "stop": "STOP"}
    answer = (await client_of(answering(1)).post("/v1/chat/completions", json=body)).json()
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["seed"]) == ("chat.completion", 2**64 - 1)
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "naïve 😀 fox ", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"]["prompt_tokens"] == CHAT_PROMPT
    assert answer["metrics"]["speculative_decoding"]["num_spec_steps"] == 0


async def test_several_prompts_are_several_choices(client_of: ClientOf) -> None:
    def script(request: GenerationRequest) -> list[SessionEvent]:
        return steps(list(request.params.prompt) * 2, 3)

    fields = {"prompt": [[70, 71], [72, 73, 74], [75]], "max_tokens": 9}
    client = client_of(ScriptedRunner(MODEL, script))
    whole = (await client.post("/v1/completions", json=fields)).json()
    expected = [TOKENIZER.decode(prompt * 2) for prompt in fields["prompt"]]
    assert [choice["text"] for choice in whole["choices"]] == expected
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"] == {**usage(6, 12), "prompt_tokens_details": {"cached_tokens": 9}}

    streamed = ["", "", ""]
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = await events(await client.post("/v1/completions", json=fields))
    for chunk in chunks:
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["text"]
    assert streamed == expected
    assert {key: last[key] for key in ("usage", "metrics")} == {
        key: whole[key] for key in ("usage", "metrics")
    }


async def test_a_streamed_completion(client_of: ClientOf) -> None:
    body = {"prompt": "the fox", "stream": True}
    chunks = await events(await client_of(answering()).post("/v1/completions", json=body))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [
        "length"
    ]
    assert len({chunk["id"] for chunk in chunks}) == 1 and chunks[0]["id"].startswith("cmpl-")
    assert all(chunk["object"] == "text_completion" and chunk["seed"] == DRAWN for chunk in chunks)
    assert all("usage" not in chunk and "metrics" not in chunk for chunk in chunks)


async def test_a_streamed_chat_with_usage(client_of: ClientOf) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first, *chunks, end, last = await events(
        await client_of(answering()).post("/v1/chat/completions", json=body)
    )
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == TEXT
    assert end["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert all(chunk["usage"] is None for chunk in (first, *chunks, end))
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in (first, *chunks, end, last))
    assert (last["choices"], last["usage"]) == ([], usage(CHAT_PROMPT))
    assert last["metrics"] == {"speculative_decoding": speculation(4), "numerics_changes": 0}
    assert first["seed"] == last["seed"] == DRAWN


async def test_usage_so_far_on_every_chunk(client_of: ClientOf) -> None:
    body = {
        "prompt": "the fox",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    chunks = await events(await client_of(answering(1)).post("/v1/completions", json=body))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == len(IDS)
    assert all(
        chunk["usage"]["total_tokens"] == PROMPT + count for chunk, count in zip(chunks, counts, strict=True)
    )


def refusal(response: httpx.Response) -> dict[str, Any]:
    (error,) = response.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    return error  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value at line 1 column 1"),
        (b'{"prompt": "x",\n  "seed": }', "Expecting value at line 2, column 11"),
        (b'{"prompt": "x"', "at line 1, column 15"),
        (b'{"prompt": "\xff"}', "byte 12 is not UTF-8"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "a number is too long"),
        (b"[" * 10_000, "the nesting too deep"),
        (b"[" * 100_000, "the body has 100000 objects and arrays"),
        (b"[]", "must be a JSON object, not an array"),
    ],
    ids=["empty", "hole", "cut", "latin-1", "digits", "nesting", "count", "array"],
)
async def test_a_body_that_is_no_json_object(
    client_of: ClientOf, path: str, content: bytes, message: str
) -> None:
    response = await client_of(answering()).post(path, content=content)
    assert response.status_code == 400
    assert message.replace(" 1 column", " 1, column") in refusal(response)["message"]


@pytest.mark.parametrize(
    ("raw", "param", "message"),
    [
        ('"temperature": NaN', "temperature", "temperature must be a finite number"),
        ('"temperature": 1e999', "temperature", "temperature must be a finite number"),
        ('"temperature": -1', "temperature", "temperature must be in [0, 100]"),
        ('"max_tokens": 0', "max_tokens", "from 1 to"),
        ('"max_tokens": 65', "max_tokens", "not 65"),
        ('"prompt": ""', "prompt", "prompt is empty"),
        ('"prompt": [99999]', "prompt", "token id 99999"),
        ('"logit_bias": {"5": 1' + "0" * 400 + "}", "logit_bias", "[-100, 100]"),
        ('"best_of": 65', "best_of", "best_of must be in [1, 64]"),
        ('"foo": 2', "foo", "unknown field foo"),
        ('"\\ud800": 2', "\\ud800", "unknown field \\ud800"),
    ],
)
async def test_bad_fields_over_http(client_of: ClientOf, raw: str, param: str, message: str) -> None:
    client = client_of(answering())
    response = await client.post("/v1/completions", content='{"prompt": "x", ' + raw + "}")
    error = refusal(response)
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param and message in error["message"]
    assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200


async def test_an_unknown_model_and_unknown_routes(client_of: ClientOf) -> None:
    client = client_of(answering())
    response = await client.post("/v1/completions", json={"prompt": "x", "model": "other"})
    assert response.status_code == 404 and "'other'" in refusal(response)["message"]
    assert refusal(response)["param"] == "model"
    assert (await client.get("/v1/models/other")).status_code == 404
    response = await client.get("/v1/nothing")
    assert response.status_code == 404
    assert refusal(response)["message"] == "GET /v1/nothing is not served"
    response = await client.post("/v1/completions/", headers={"host": "elsewhere"})  # nor sent on there
    assert response.status_code == 404
    response = await client.get("/v1/completions")
    assert response.status_code == 405 and response.headers["allow"] == "POST"
    assert refusal(response)["message"] == "GET /v1/completions is not served; allowed here: POST"


async def test_a_message_does_not_echo_all_of_what_was_sent(client_of: ClientOf) -> None:
    response = await client_of(answering()).post("/v1/completions", json={"prompt": "x", "m" * 20000: 1})
    assert response.status_code == 400 and len(response.text) < 1000


async def test_a_model_can_be_retrieved_and_health_asked_without_a_body(client_of: ClientOf) -> None:
    client = client_of(answering())
    (listed,) = (await client.get("/v1/models")).json()["data"]
    assert (await client.get(f"/v1/models/{listed['id']}")).json() == listed
    assert (await client.get("/v1/models/")).status_code == 404
    assert (await client.head("/health")).status_code == 200


async def test_an_encoded_body_is_refused_as_such(client_of: ClientOf) -> None:
    response = await client_of(answering()).post(
        "/v1/completions", content=b"zzz", headers={"content-encoding": "gzip"}
    )
    assert response.status_code == 400
    assert "content-encoding gzip is not supported" in refusal(response)["message"]


async def test_the_servers_own_message_can_be_sent_back(client_of: ClientOf) -> None:
    client = client_of(answering())
    body = {"messages": [{"role": "user", "content": "a"}]}
    answered = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
    body["messages"] += [answered, {"role": "user", "content": "b"}]
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


async def chunked(total: int) -> AsyncIterator[bytes]:
    for _ in range(total // 100):
        yield b"x" * 100


@pytest.mark.parametrize("length_is_known", [True, False])
async def test_a_body_over_the_limit(client_of: ClientOf, length_is_known: bool) -> None:
    client = client_of(answering(), bodies=Bodies(1000))
    content = b"x" * 1100 if length_is_known else chunked(1100)
    response = await client.post("/v1/completions", content=content)
    assert response.status_code == 413
    assert refusal(response)["message"] == "the body is over the limit of 1000 bytes"
    exact = b'{"prompt": "x"}'.ljust(1000)
    assert (await client.post("/v1/completions", content=exact)).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (Overloaded("too many"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (Unavailable("no verifier"), 503, "unavailable_error", None),
    ],
)
async def test_a_refusal_of_the_sessions_keeps_its_status_even_for_a_stream(
    client_of: ClientOf, error: Exception, status: int, kind: str, code: str | None, stream: bool
) -> None:
    client = client_of(ScriptedRunner(MODEL, lambda request: [error]))
    response = await client.post("/v1/completions", json={"prompt": "x", "stream": stream})
    assert response.status_code == status
    assert response.headers["retry-after"] == "1"
    assert refusal(response) == {"message": str(error), "type": kind, "param": None, "code": code}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Unavailable("the verifier was lost"), "the verifier was lost"),
        (ZeroDivisionError("secret 10.0.0.7"), "the server failed to answer this request; its log says why"),
    ],
)
async def test_an_error_in_the_middle_of_a_stream_is_its_last_event(
    client_of: ClientOf, error: Exception, message: str, metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    runner = ScriptedRunner(MODEL, lambda request: [*steps(IDS[:9])[:-1], error])
    response = await client_of(runner).post("/v1/completions", json={"prompt": "x", "stream": True})
    *chunks, last = await events(response)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TOKENIZER.decode(IDS[:9])
    assert last["error"]["message"] == message
    assert ("secret" in caplog.text) == isinstance(error, ZeroDivisionError)
    assert runner.open == 0


async def test_an_unforeseen_error_says_nothing_of_itself(client_of: ClientOf) -> None:
    client = client_of(ScriptedRunner(MODEL, lambda request: [ZeroDivisionError("secret 10.0.0.7")]))
    response = await client.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 500
    assert refusal(response)["message"] == "the server failed to answer this request; its log says why"


async def test_models_health_and_metrics(client_of: ClientOf) -> None:
    runner = answering()
    client = client_of(runner)
    told = (await client.get("/v1/models")).json()
    assert told["data"][0].pop("permission")[0]["created"] == 1_700_000_000
    assert told == {
        "object": "list",
        "data": [
            {
                "id": "demo",
                "object": "model",
                "created": 1_700_000_000,
                "owned_by": "outrider",
                "root": "demo",
                "parent": None,
                "max_model_len": 64,
                "numerics": [],
            }
        ],
    }
    assert (await client.get("/health")).status_code == 200
    runner.is_ready = False
    health = await client.get("/health")
    assert (health.status_code, health.text) == (503, "not ready: no verifier is connected\n")
    await client.post("/v1/completions", json={"prompt": "x"})
    await client.post("/v1/completions", json={"prompt": ""})
    text = (await client.get("/metrics")).text
    assert f'vllm:generation_tokens_total{{model_name="demo"}} {float(len(IDS))}' in text
    assert 'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="demo",position="2"}' in text
    assert 'outrider_requests_refused_total{reason="invalid_request_error"} 1.0' in text


async def test_many_at_once_each_get_their_own_text(client_of: ClientOf) -> None:
    def script(request: GenerationRequest) -> list[SessionEvent]:
        return steps(list(request.params.prompt) * 5)

    client = client_of(ScriptedRunner(MODEL, script))
    prompts = [[60 + n, 61 + n] for n in range(20)]
    bodies = [{"prompt": prompt, "stream": bool(n % 2)} for n, prompt in enumerate(prompts)]
    responses = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
    for n, response in enumerate(responses):
        chunks = await events(response) if n % 2 else [response.json()]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text == TOKENIZER.decode(prompts[n] * 5)
