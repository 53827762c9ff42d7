"""Log-probabilities as clients get them, of scripted steps."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from outrider.errors import InvalidRequest
from outrider.net.rpc import bind, channel, new_server
from outrider.v1 import generation_pb2, generation_pb2_grpc
from outrider.wire.logprobs import Logprob, from_numbers, numbers
from outrider.wire.session import FinishReason
from router.api.grpc_generation import add_generation_service
from router.api.intake import Intake
from router.api.logprobs import HeldScores, Scored, Told
from router.detokenize import piece
from router.metrics import Metrics
from router.requests import GenerationRequest, SessionEnded, SessionEvent, TokensCommitted
from tests.router.api.scripted import EOS, ScriptedRunner, byte_level, sentencepiece, served

TOKENIZER = byte_level()
MODEL = served(TOKENIZER)
IDS = TOKENIZER.encode("é fox", add_special_tokens=False).ids
END = TOKENIZER.token_to_id(EOS)
ClientOf = Callable[..., httpx.AsyncClient]


def scored(request: GenerationRequest) -> list[SessionEvent]:
    """Two tokens a step, the last of which is the end of the text."""
    tokens, events = [*IDS, END], []
    top = ((IDS[0], -0.25), (END, float("-inf")))[: request.params.logprobs or 0]
    for start in range(0, len(tokens), 2):
        part = tuple(tokens[start : start + 2])
        told = tuple(Logprob(-1.0 - start, top) for _ in part) if request.params.logprobs is not None else ()
        events.append(TokensCommitted(part, 0, 0, logprobs=told))
    return [*events, SessionEnded(FinishReason.STOP)]


def pieces() -> list[bytes]:
    return [piece(TOKENIZER, token) for token in IDS]


def test_the_pieces_of_a_text_are_the_text() -> None:
    assert b"".join(pieces()).decode() == "é fox"
    other = sentencepiece()
    ids = other.encode("the é", add_special_tokens=False).ids
    assert b"".join(piece(other, token) for token in ids).decode() == " the é"
    assert piece(TOKENIZER, 10**6) == b""


async def test_a_completion(client_of: ClientOf) -> None:
    client = client_of(ScriptedRunner(MODEL, scored))
    answer = (await client.post("/v1/completions", json={"prompt": "a", "logprobs": 2})).json()
    told = answer["choices"][0]["logprobs"]
    assert told["tokens"][-2:] == [pieces()[-1].decode(), EOS]
    assert told["token_logprobs"] == [-1.0 - index // 2 * 2 for index in range(len(IDS) + 1)]
    assert all(
        len(top) == 3 or own in top for top, own in zip(told["top_logprobs"], told["tokens"], strict=True)
    )
    assert min(min(top.values()) for top in told["top_logprobs"]) == -9999
    text = answer["choices"][0]["text"]
    for offset, token in zip(told["text_offset"], told["tokens"][:-1], strict=False):
        assert token.startswith("bytes:") or text[offset:].startswith(token)
    assert (await client.post("/v1/completions", json={"prompt": "a"})).json()["choices"][0][
        "logprobs"
    ] is None
    none_but_own = (await client.post("/v1/completions", json={"prompt": "a", "logprobs": 0})).json()
    tops = none_but_own["choices"][0]["logprobs"]["top_logprobs"]
    assert [list(top) for top in tops] == [[token] for token in told["tokens"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat(client_of: ClientOf, stream: bool) -> None:
    client = client_of(ScriptedRunner(MODEL, scored))
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
    fields |= {"top_logprobs": 1, "stream": stream}
    response = await client.post("/v1/chat/completions", json=fields)
    if stream:
        chunks = [
            httpx.Response(200, text=line[6:]).json() for line in response.text.split("\n") if "{" in line
        ]
        told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        content = [one for part in told if part for one in part["content"]]
    else:
        content = response.json()["choices"][0]["logprobs"]["content"]
    assert [bytes(one["bytes"]) for one in content] == [*pieces(), EOS.encode()]
    assert [one["logprob"] for one in content] == [-1.0 - index // 2 * 2 for index in range(len(IDS) + 1)]
    assert all([top["logprob"] for top in one["top_logprobs"]] == [-0.25] for one in content)


async def test_grpc() -> None:
    server = new_server()
    add_generation_service(server, Intake(ScriptedRunner(MODEL, scored), lambda below: 0), Metrics())
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    async with channel(address) as connection:
        stub: Any = generation_pb2_grpc.GenerationStub(connection)
        chat = generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="user", content="hi")])
        for prompt in ({"text": "a"}, {"token_ids": generation_pb2.TokenIds(ids=[5])}, {"chat": chat}):
            request = generation_pb2.GenerateRequest(logprobs=1, **prompt)
            told = [one async for one in stub.Generate(request)]
            logprobs = [each for one in told for each in one.delta.logprobs]
            assert [each.token_id for each in logprobs] == [*IDS, END]
            assert [each.piece for each in logprobs] == [*pieces(), EOS.encode()]
            assert all([top.logprob for top in each.top] == [-0.25] for each in logprobs)
            plain = stub.Generate(generation_pb2.GenerateRequest(**prompt))
            assert not [each async for one in plain for each in one.delta.logprobs]
    await server.stop(0)


def test_numbers_of_a_message_that_do_not_fit_are_refused() -> None:
    told = (Logprob(-1.0, ((5, -0.5), (6, -1.0))), Logprob(-2.0, ((7, -0.5), (8, -1.0))))
    assert from_numbers(*numbers(told)) == told
    for odd in (([-1.0], [1, 2], [-1.0]), ([-1.0, -1.0], [1], [-1.0]), ([-1.0], [1] * 21, [-1.0] * 21)):
        with pytest.raises(InvalidRequest):
            from_numbers(*odd)


def test_what_is_held_of_an_answer_is_what_was_told() -> None:
    other = Told(5, b"b", -9999.0)
    told = [Scored(Told(7, b"a", -0.25), (other,) * 2, 0), Scored(other, (), 3), Scored(other, (other,), 4)]
    held = HeldScores()
    held.extend(told[:1])
    held.extend(told[1:])
    assert list(held) == told and (held[-1], held[1:]) == (told[-1], told[1:])
    assert not HeldScores() and list(HeldScores()) == []


async def test_an_answer_that_is_being_written_holds_little_of_each_number(client_of: ClientOf) -> None:
    """It may be as long as a context, and all that a router has may be."""
    top, most = tuple((token, -1.5) for token in range(20)), 3000

    def long(request: GenerationRequest) -> list[SessionEvent | Exception | None]:
        step = TokensCommitted((IDS[0],), 0, 0, logprobs=(Logprob(-1.5, top),))  # one, told again and again
        return [*[step] * request.params.max_tokens, None, SessionEnded(FinishReason.LENGTH)]

    runner = ScriptedRunner(served(TOKENIZER, max_context=2 * most), long)
    client = client_of(runner)

    async def held(tokens: int) -> int:
        """Returns the bytes of memory when an answer of so many tokens is about to end."""
        runner.waiting.clear()
        runner.go_on.clear()
        asked = {"prompt": "a", "logprobs": 20, "max_tokens": tokens}
        answering = asyncio.create_task(client.post("/v1/completions", json=asked))
        await runner.waiting.wait()
        memory, _ = tracemalloc.get_traced_memory()
        runner.go_on.set()
        assert len((await answering).json()["choices"][0]["logprobs"]["tokens"]) == tokens
        return memory

    tracemalloc.start()
    try:
        await held(1)  # what is made once
        few = await held(1)
        numbers = 21 * most
        assert await held(most) - few < 20 * numbers
    finally:
        tracemalloc.stop()
