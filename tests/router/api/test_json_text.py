"""Long answers are encoded in pieces: one call of the encoder holds the interpreter, in a thread too."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pydantic_core
import pytest

from outrider.wire.logprobs import Logprob
from outrider.wire.session import FinishReason
from router.api import http, json_text
from router.api.json_text import BATCH, Made, long_json, to_json, to_long_json
from router.requests import GenerationRequest, SessionEnded, SessionEvent, TokensCommitted
from tests.router.api.scripted import ScriptedRunner, byte_level, served

ID = re.compile("[0-9a-f]{32}")
TOKENS = 400
TOP = 20
LONGEST = 16 * 1024  # characters that one call of the encoder gives
MODEL = served(byte_level(), max_context=2 * TOKENS)
USER = [{"role": "user", "content": "a"}]
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "a", "logprobs": TOP, "max_tokens": TOKENS}),
    "chat": (
        "/v1/chat/completions",
        {"messages": USER, "logprobs": True, "top_logprobs": TOP, "max_tokens": TOKENS, "n": 2},
    ),
    "response": (
        "/v1/responses",
        {"input": "a", "top_logprobs": TOP, "max_output_tokens": TOKENS},
    ),
}


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        {"a": [], "b": {}, "c": ()},
        {"é\n": ["😀", None, True, 1.5, -7], "n": [{"x": index, "y": [index] * 3} for index in range(100)]},
        {"choices": [{"logprobs": {"content": [{"top": [[1, 2]] * 9}] * 33}} for _ in range(128)]},
        {"choices": [[], [[]], list(range(129))], "five": (1, 2, 3, 4, [5] * 40)},
        [1, [2, [3, [4, [5, list(range(50))]]]]],
        {1: "a", "b": {2: 3}},
        "text",
        7,
    ],
)
def test_a_long_answer_is_the_same_text(value: object) -> None:
    assert to_long_json(value) == to_json(value)


@pytest.mark.parametrize("shape", ASKED)
async def test_many_log_probabilities_are_told_as_few_are(
    client_of: Callable[..., httpx.AsyncClient], monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    """Half a gigabyte of objects had been made of a million, and the answer was held as JSON until taken."""
    path, body = ASKED[shape]
    client = client_of(ScriptedRunner(MODEL, scored))
    whole = (await client.post(path, json={**body, "seed": 1})).content
    monkeypatch.setattr(http, "MANY_SCORES", 100)
    answer = await client.post(path, json={**body, "seed": 1})
    assert "content-length" not in answer.headers and answer.headers["content-type"] == "application/json"
    assert ID.sub("", answer.text) == ID.sub("", whole.decode())


def test_a_list_is_made_while_it_is_written() -> None:
    made: list[int] = []
    lazy = Made(range(BATCH), lambda number: made.append(number) or {"n": number})  # type: ignore[func-returns-value]
    parts = long_json(lambda: {"choices": [{"a": lazy}]})
    first = next(parts)
    assert len(first) < 2 * BATCH and len(made) < len(lazy) / 4
    whole = first + b"".join(parts)
    assert whole.decode() == to_json({"choices": [{"a": [{"n": number} for number in range(BATCH)]}]})
    assert to_json(lazy) == to_json([{"n": number} for number in range(BATCH)])


def scored(request: GenerationRequest) -> list[SessionEvent]:
    """Letters, each with the likeliest tokens."""
    top = tuple((token, -1.0 - token) for token in range(30, 30 + TOP))
    told = [TokensCommitted((70,), 0, 0, logprobs=(Logprob(-0.5, top),)) for _ in range(TOKENS)]
    return [*told, SessionEnded(FinishReason.LENGTH)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shape", ASKED)
async def test_no_call_of_the_encoder_gives_much(
    client_of: Callable[..., httpx.AsyncClient], monkeypatch: pytest.MonkeyPatch, shape: str, stream: bool
) -> None:
    longest = 0
    encode = pydantic_core.to_json

    def noting(value: object, **rest: Any) -> bytes:
        nonlocal longest
        text = encode(value, **rest)
        longest = max(longest, len(text))
        return text

    monkeypatch.setattr(json_text, "pydantic_core", SimpleNamespace(to_json=noting))
    path, body = ASKED[shape]
    answer = await client_of(ScriptedRunner(MODEL, scored)).post(path, json={**body, "stream": stream})
    assert answer.status_code == 200, answer.text
    assert len(answer.text) > 5 * LONGEST  # or there was nothing to see
    assert longest <= LONGEST
