"""When a text ends and what of its tokens it has: fields of vLLM's, of scripted steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest

from outrider.net.rpc import bind, channel, new_server
from outrider.v1 import generation_pb2, generation_pb2_grpc
from outrider.wire.logprobs import Logprob
from outrider.wire.session import FinishReason
from router.api.grpc_generation import add_generation_service
from router.api.intake import Intake
from router.metrics import Metrics
from router.requests import GenerationRequest, SessionEnded, SessionEvent, TokensCommitted
from tests.router.api.scripted import BOS, EOS, ScriptedRunner, byte_level, served

TOKENIZER = byte_level()
MODEL = served(TOKENIZER)
BEGIN, END = TOKENIZER.token_to_id(BOS), TOKENIZER.token_to_id(EOS)
FOX = TOKENIZER.encode("fox", add_special_tokens=False).ids
OVER = TOKENIZER.encode(" over", add_special_tokens=False).ids
IDS = [*FOX, BEGIN, *OVER, END]
ClientOf = Callable[..., httpx.AsyncClient]


def script(ids: Sequence[int]) -> Callable[[GenerationRequest], list[SessionEvent]]:
    def made(request: GenerationRequest) -> list[SessionEvent]:
        events: list[SessionEvent] = []
        for token in ids:
            told = (Logprob(-1.0),) if request.params.logprobs is not None else ()
            events.append(TokensCommitted((token,), 0, 0, logprobs=told))
            if token in request.params.stop_token_ids:
                return [*events, SessionEnded(FinishReason.STOP)]
        return [*events, SessionEnded(FinishReason.LENGTH)]

    return made


CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "fox over"),
    ({"skip_special_tokens": False}, "fox<s> over"),
    ({"include_stop_str_in_output": True}, "fox over"),
    ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "fox<s> over</s>"),
    ({"stop_token_ids": [OVER[0]]}, "fox"),
    ({"stop_token_ids": [FOX[-1]], "include_stop_str_in_output": True}, "fox"),
    ({"stop_token_ids": [FOX[-1]]}, TOKENIZER.decode(FOX[:-1])),
    ({"stop": ["ox", "over"]}, "f"),
    ({"stop": ["ox", "over"], "include_stop_str_in_output": True}, "fox"),
    ({"stop": ["ox", "ove"], "min_tokens": len(FOX) + 1}, "fox "),
    ({"stop": ["ox", "ove"], "min_tokens": len(FOX) + 1, "include_stop_str_in_output": True}, "fox ove"),
]


@pytest.mark.parametrize(("fields", "text"), CASES)
async def test_whole_streamed_and_by_grpc(client_of: ClientOf, fields: dict[str, Any], text: str) -> None:
    client = client_of(ScriptedRunner(MODEL, script(IDS)))
    asked = {"prompt": "a", "max_tokens": 30, **fields}
    whole = (await client.post("/v1/completions", json=asked)).json()["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (text, "stop")
    streamed = (await client.post("/v1/completions", json=asked | {"stream": True})).text
    chunks = [httpx.Response(200, text=line[6:]).json() for line in streamed.split("\n") if "{" in line]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    server = new_server()
    add_generation_service(server, Intake(ScriptedRunner(MODEL, script(IDS)), lambda below: 0), Metrics())
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    async with channel(address) as connection:
        stub: Any = generation_pb2_grpc.GenerationStub(connection)
        request = generation_pb2.GenerateRequest(text="a", max_tokens=30, **fields)
        assert "".join([one.delta.text async for one in stub.Generate(request)]) == text
    await server.stop(0)


async def test_every_token_has_its_logprob_the_last_one_too(client_of: ClientOf) -> None:
    client = client_of(ScriptedRunner(MODEL, script(IDS)))
    answer = (await client.post("/v1/completions", json={"prompt": "a", "logprobs": 0})).json()
    told = answer["choices"][0]["logprobs"]
    assert len(told["tokens"]) == len(IDS) == answer["usage"]["completion_tokens"]
    assert told["tokens"][-1] == EOS


async def test_what_cannot_be_is_refused(client_of: ClientOf) -> None:
    client = client_of(ScriptedRunner(MODEL, script(IDS)))
    every = list(range(MODEL.vocab_size))
    for fields, message in (
        ({"min_tokens": 31}, "min_tokens must be from 0 to 30 here (max_tokens), not 31"),
        ({"min_tokens": -1}, "min_tokens must be from 0 to 30"),
        ({"stop_token_ids": [MODEL.vocab_size]}, f"ids go from 0 to {MODEL.vocab_size - 1}"),
        ({"stop_token_ids": ["5"]}, "stop_token_ids must be token ids (integers) throughout"),
        ({"stop_token_ids": 5}, "stop_token_ids must be an array of token ids, not an integer"),
        ({"stop_token_ids": [5] * 1025}, "stop_token_ids must be at most 1024 token ids, not 1025"),
        ({"stop_token_ids": every, "min_tokens": 1}, "leave no token"),
        ({"min_tokens": 1, "response_format": {"type": "json_object"}}, "say where the text ends"),
    ):
        response = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 30, **fields})
        assert response.status_code == 400 and message in response.json()["error"]["message"]
