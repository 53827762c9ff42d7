"""OpenAI's predicted output: what may be sent, what reaches the session, and what usage says of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from outrider.net.rpc import bind, channel, new_server
from outrider.v1 import generation_pb2, generation_pb2_grpc
from outrider.wire.guesses import DrafterCounts, OwnCounts
from outrider.wire.session import FinishReason
from router.api.grpc_generation import add_generation_service
from router.api.intake import Intake
from router.metrics import Metrics
from router.requests import GenerationRequest, SessionEnded, SessionEvent, TokensCommitted
from tests.router.api.scripted import ScriptedRunner, byte_level, served

TOKENIZER = byte_level()
MODEL = served(TOKENIZER)
FOX = tuple(TOKENIZER.encode("the quick", add_special_tokens=False).ids)
ClientOf = Callable[..., httpx.AsyncClient]
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 20}
BOTH = (DrafterCounts(0, 3, 1, 2, "small"), DrafterCounts(1, 1, 0, 0, "suffix"))
DETAILS = {"accepted_prediction_tokens": 1, "rejected_prediction_tokens": 2}


class Asked:
    """Keeps what sessions were asked for, and plays a step with three guesses and a plain one."""

    def __init__(self) -> None:
        self.predictions: list[tuple[int, ...]] = []
        self.requests: list[GenerationRequest] = []

    def __call__(self, request: GenerationRequest) -> list[SessionEvent]:
        self.requests.append(request)
        self.predictions.append(tuple(request.params.prediction))
        own = OwnCounts(3, 1, 1, 1) if request.params.prediction else OwnCounts()
        return [
            TokensCommitted(FOX[:2], 1, 3, own=own, drafters=BOTH),
            TokensCommitted(FOX[2:3], 0, 0),
            SessionEnded(FinishReason.LENGTH),
        ]


@pytest.mark.parametrize(
    "content", ["the quick", [{"type": "text", "text": "the "}, {"type": "text", "text": "quick"}]]
)
async def test_it_reaches_the_session_and_usage_tells_what_became_of_it(
    client_of: ClientOf, content: object
) -> None:
    asked = Asked()
    client = client_of(ScriptedRunner(MODEL, asked))
    body: dict[str, Any] = CHAT | {"prediction": {"type": "content", "content": content}}
    whole = (await client.post("/v1/chat/completions", json=body)).json()
    assert asked.predictions == [FOX]
    assert whole["usage"]["completion_tokens_details"] == DETAILS
    assert whole["metrics"]["speculative_decoding"]["own_guesses"] == {
        "prediction": {"num_draft_tokens": 3, "num_accepted_draft_tokens": 1},
        "grammar": {"num_draft_tokens": 1, "num_accepted_draft_tokens": 1},
        "speculator": {"num_draft_tokens": 0, "num_accepted_draft_tokens": 0},
    }
    assert whole["metrics"]["speculative_decoding"]["drafters"] == {
        "small": {"num_draft_tokens": 3, "num_accepted_draft_tokens": 1},
        "suffix": {"num_draft_tokens": 1, "num_accepted_draft_tokens": 0},
    }
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    lines = (await client.post("/v1/chat/completions", json=streamed)).text.split("\n")
    *_, last = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert last["usage"]["completion_tokens_details"] == DETAILS


async def test_all_answers_to_a_request_have_one_prediction(client_of: ClientOf) -> None:
    asked = Asked()
    body = CHAT | {"prediction": {"type": "content", "content": "the quick"}, "n": 3}
    assert (await client_of(ScriptedRunner(MODEL, asked)).post("/v1/chat/completions", json=body)).is_success
    assert asked.predictions == [FOX] * 3
    assert len({id(request.params.prediction) for request in asked.requests}) == 1


async def test_who_sends_none_hears_of_none(client_of: ClientOf) -> None:
    asked = Asked()
    client = client_of(ScriptedRunner(MODEL, asked))
    for body in (CHAT, CHAT | {"prediction": None}):
        whole = (await client.post("/v1/chat/completions", json=body)).json()
        assert "completion_tokens_details" not in whole["usage"]
        assert "own_guesses" not in whole["metrics"]["speculative_decoding"]
    assert asked.predictions == [(), ()]


async def test_what_cannot_be_is_refused_in_one_line(client_of: ClientOf) -> None:
    client = client_of(ScriptedRunner(MODEL, Asked()))
    long = "the quick " * 40
    for prediction, message in (
        ("the quick", 'prediction must be an object {"type": "content", "content": ...}'),
        ({"type": "text", "content": "a"}, "prediction must be an object"),
        ({"type": "content", "content": "a", "more": 1}, "prediction must be an object"),
        ({"type": "content"}, "prediction must be a string"),
        ({"type": "content", "content": 5}, "prediction must be a string"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "part 0 is of type"),
        ({"type": "content", "content": long}, "prediction has "),
    ):
        response = await client.post("/v1/chat/completions", json=CHAT | {"prediction": prediction})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "prediction"), prediction
        assert message in error["message"]


async def test_by_grpc() -> None:
    asked = Asked()
    server = new_server()
    add_generation_service(server, Intake(ScriptedRunner(MODEL, asked), lambda below: 0), Metrics())
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    async with channel(address) as connection:
        stub: Any = generation_pb2_grpc.GenerationStub(connection)
        request = generation_pb2.GenerateRequest(text="a", max_tokens=20, prediction="the quick")
        *_, last = [one async for one in stub.Generate(request)]
    await server.stop(0)
    assert asked.predictions == [FOX]
    usage = last.completed.usage
    assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (1, 2)
    assert last.completed.speculative_decoding.own.forced == 1
