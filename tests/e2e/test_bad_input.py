"""Bad requests to the real service: one clear line each, and other clients notice nothing."""

from __future__ import annotations

import json
from typing import Any

import grpc
import httpx
import pytest

from outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.e2e.conftest import Serve

pytestmark = pytest.mark.process

COMPLETION = {"model": "outrider-demo", "prompt": "x = 1\n", "max_tokens": 4}

CASES: list[tuple[str, Any, int, list[str]]] = [
    ("malformed JSON", b"{", 400, ["JSON"]),
    ("not an object", b"[]", 400, ["object"]),
    ("empty prompt", {**COMPLETION, "prompt": ""}, 400, ["prompt"]),
    ("empty list of ids", {**COMPLETION, "prompt": []}, 400, ["prompt"]),
    ("prompt longer than the context", {**COMPLETION, "prompt": [5] * 9000}, 400, ["prompt", "8192"]),
    ("max_tokens 0", {**COMPLETION, "max_tokens": 0}, 400, ["max_tokens"]),
    ("max_tokens too large", {**COMPLETION, "max_tokens": 10**6}, 400, ["max_tokens", "8192"]),
    ("negative temperature", {**COMPLETION, "temperature": -1}, 400, ["temperature", "0"]),
    ("temperature NaN", b'{"model":"outrider-demo","prompt":"a","temperature":NaN}', 400, ["temperature"]),
    ("top_p 0", {**COMPLETION, "top_p": 0}, 400, ["top_p", "1"]),
    ("n 65", {**COMPLETION, "n": 65}, 400, ["n"]),
    ("unknown model", {**COMPLETION, "model": "gpt-9"}, 404, ["gpt-9", "outrider-demo"]),
    ("token id out of range", {**COMPLETION, "prompt": [1, 10**6]}, 400, ["prompt", "1000000"]),
    ("negative token id", {**COMPLETION, "prompt": [-1]}, 400, ["prompt"]),
    ("unknown field", {**COMPLETION, "frobnicate": 1}, 400, ["frobnicate"]),
    (
        "unsupported field",
        {**COMPLETION, "truncate_prompt_tokens": 5},
        400,
        ["truncate_prompt_tokens", "not"],
    ),
    ("bias outside", {**COMPLETION, "logit_bias": {"999999": 1}}, 400, ["logit_bias", "999999"]),
    ("seed negative", {**COMPLETION, "seed": -1}, 400, ["seed"]),
    ("body over the limit", b'{"prompt": "' + b"a" * (9 * 2**20) + b'"}', 413, ["8"]),
]


@pytest.mark.parametrize(("name", "body", "status", "words"), CASES, ids=[case[0] for case in CASES])
def test_bad_requests(serve: Serve, name: str, body: Any, status: int, words: list[str]) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx.post(serve.url + "/v1/completions", content=content, trust_env=False, timeout=240)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    for word in words:
        assert word in f"{error['param']} {error['message']}"
    assert "\n" not in error["message"] and "Traceback" not in answer.text
    after = httpx.post(serve.url + "/v1/completions", json=COMPLETION, trust_env=False, timeout=240)
    assert after.status_code == 200


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (generation_pb2.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, ["prompt"]),
        (
            generation_pb2.GenerateRequest(text="a", temperature=-1),
            grpc.StatusCode.INVALID_ARGUMENT,
            ["temperature"],
        ),
        (
            generation_pb2.GenerateRequest(text="a", temperature=float("nan")),
            grpc.StatusCode.INVALID_ARGUMENT,
            ["temperature"],
        ),
        (
            generation_pb2.GenerateRequest(text="a", max_tokens=0),
            grpc.StatusCode.INVALID_ARGUMENT,
            ["max_tokens"],
        ),
        (generation_pb2.GenerateRequest(text="a", model="gpt-9"), grpc.StatusCode.NOT_FOUND, ["gpt-9"]),
        (
            generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[10**6])),
            grpc.StatusCode.INVALID_ARGUMENT,
            ["1000000"],
        ),
    ],
)
def test_bad_grpc_requests(serve: Serve, request_: Any, code: grpc.StatusCode, words: list[str]) -> None:
    with grpc.insecure_channel(serve.grpc_address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            list(generation_pb2_grpc.GenerationStub(channel).Generate(request_, timeout=240))
        assert caught.value.code() is code
        for word in words:
            assert word in caught.value.details()
        good = generation_pb2.GenerateRequest(text="x = 1\n", max_tokens=4)
        assert list(generation_pb2_grpc.GenerationStub(channel).Generate(good, timeout=240))
