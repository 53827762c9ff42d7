"""Answers that repeat many numbers: little of them is there while their client takes them."""

from __future__ import annotations

import asyncio
import json
import random
import tracemalloc
from array import array
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing
from typing import Any

import httpx
import pytest

from outrider.sampling.params import SamplingParams
from outrider.wire.logprobs import Logprob, PromptLogprobs
from outrider.wire.session import FinishReason, SessionId
from router.api import http
from router.api.acceptance import SpeculationStats
from router.api.connection import LongJson, ServerSentEvent
from router.api.generate import generate_all
from router.api.json_text import BATCH, long_json
from router.api.logprobs import Scored, Told
from router.api.output import GROUP, GROUP_NUMBERS, Chunk, Details, Output, Result, Usage, group
from router.api.prompt_logprobs import ScoredPrompt
from router.api.record import recalled
from router.api.responses import CompletionShape, Envelope
from router.api.responses_api import ResponseTelling
from router.api.threads import Threads
from router.metrics import Metrics
from router.requests import GenerationRequest, SessionEnded, SessionEvent, TokensCommitted
from tests.router.api.scripted import ScriptedRunner, byte_level, served

ID, TOP = SessionId(bytes(16)), 20
TOKENIZER = byte_level()
IDS = TOKENIZER.encode(" the fox", add_special_tokens=False).ids
LONG = 200  # tokens of an answer
PROMPT = 50


def held(parts: Callable[[], Iterator[bytes]]) -> tuple[int, int]:
    """Returns the bytes of memory that were taken until the first part was there, and those of all parts."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        told = parts()
        size, (after, _) = len(next(told)), tracemalloc.get_traced_memory()
        return after - before, size + sum(map(len, told))
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("asked", "repeated"), [(True, False), (False, True), (True, True)])
def test_numbers_of_prompts_are_made_while_they_are_written(asked: bool, repeated: bool) -> None:
    """88 prompts of 70 tokens: 57 MiB had lain in a router for as long as a client took the answer slowly."""
    rng, prompts, count = random.Random(1), 40, 50
    top = (count - 1) * TOP
    told = PromptLogprobs(
        array("f", [-1.5] * (count - 1)),
        array("I", [3] * (count - 1)),
        array("I", [rng.randrange(300, 4000) for _ in range(top)]),
        array("f", [-9 * rng.random() for _ in range(top)]),
    )
    prompt = ScoredPrompt(
        [rng.randrange(300, 4000) for _ in range(count)], told, b"tok%d".__mod__, frozenset(), asked, repeated
    )
    details = [Details(prompt=prompt) for _ in range(prompts)]
    results = [Result("x", FinishReason.LENGTH, Usage(count, 1), SpeculationStats())] * prompts
    envelope = Envelope(CompletionShape(), ID, 0, "m", 1)
    memory, size = held(lambda: long_json(lambda: envelope.whole(["x"] * prompts, results, details)))
    assert size > 15 * BATCH
    assert memory < 10 * BATCH


def test_the_end_of_responses_tells_them_again_in_parts() -> None:
    """Four events, each with all of them: at 8,000 tokens 45 MiB, which a client could leave there."""
    telling = ResponseTelling(ID, 0, "m", SamplingParams(), {})
    list(telling._said("x"))
    one = Scored(Told(5, b" abcd", -0.5), tuple(Told(at, b" ab%d" % at, -1.25 - at) for at in range(TOP)), 0)
    telling._scored.extend([one] * 1000)
    result = Result("", FinishReason.LENGTH, Usage(3, 1000), SpeculationStats())
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    ends = list(telling._finish(result))
    memory = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(ends) == 4 and memory < BATCH
    for end in ends:
        memory, size = held(lambda end=end: end.encoded()[1])
        assert size > 10 * BATCH and memory < 10 * BATCH


def committed(request: GenerationRequest) -> list[SessionEvent]:
    """A long answer, and what is asked of it and of its prompt."""
    prompt, of_prompt = request.params.prompt, request.params.prompt_logprobs
    told = PromptLogprobs()
    if of_prompt is not None:
        for _ in prompt[1:]:
            told.extend(PromptLogprobs(*(array(kind, (1,)) for kind in "fI")))
            told.top_tokens.extend(IDS[:of_prompt])
            told.top.extend([-0.5] * len(IDS[:of_prompt]))
    events: list[SessionEvent] = []
    for at in range(request.params.max_tokens):
        own = (Logprob(-1.0 - at, ((IDS[0], -0.25),)),) if request.params.logprobs is not None else ()
        scores = told if of_prompt is not None and not at else None
        events.append(TokensCommitted((IDS[at % len(IDS)],), 0, 0, logprobs=own, prompt=scores))
    return [*events, SessionEnded(FinishReason.LENGTH)]


def data_of(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def test_what_is_told_in_parts_is_what_was_told_before(
    client_of: Callable[..., httpx.AsyncClient],
) -> None:
    client = client_of(ScriptedRunner(served(TOKENIZER, max_context=2 * LONG), committed))
    body = {"input": "a", "max_output_tokens": LONG, "top_logprobs": 1, "stream": True}
    body["include"] = ["message.output_text.logprobs"]
    told = data_of((await client.post("/v1/responses", json=body)).text)
    scores = [one for data in told if "delta" in data for one in data["logprobs"]]
    *_, text, part, item, last = told
    assert len(scores) == LONG and text["logprobs"] == scores
    assert part["part"]["logprobs"] == item["item"]["content"][0]["logprobs"] == scores
    assert last["response"]["output"] == [item["item"]]


async def test_of_a_stream_the_first_chunk_may_be_long(client_of: Callable[..., httpx.AsyncClient]) -> None:
    client = client_of(ScriptedRunner(served(TOKENIZER, max_context=2 * LONG), committed))
    body = {"prompt": IDS * 20, "max_tokens": 4, "prompt_logprobs": 1, "logprobs": 1, "echo": True}
    whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]
    told = data_of((await client.post("/v1/completions", json={**body, "stream": True})).text)
    first = told[0]["choices"][0]
    assert first["prompt_logprobs"] == whole["prompt_logprobs"]
    for name, values in whole["logprobs"].items():
        parts = [chunk["choices"][0]["logprobs"] or {name: []} for chunk in told]
        assert [one for part in parts for one in part[name]] == values
    assert "prompt_logprobs" not in told[1]["choices"][0]


async def test_an_answer_with_many_numbers_of_prompts_alone_is_told_in_parts(
    client_of: Callable[..., httpx.AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MANY_SCORES", 3 * PROMPT)
    told = list[Iterable[bytes]]()

    class Seen(LongJson):
        def __init__(self, parts: Callable[[], Iterator[bytes]]) -> None:
            told.append(parts())
            super().__init__(parts)

    monkeypatch.setattr(http, "LongJson", Seen)
    client = client_of(ScriptedRunner(served(TOKENIZER, max_context=2 * LONG), committed))
    body = {"prompt": [5] * PROMPT, "max_tokens": 1, "prompt_logprobs": 2}
    for prompts in (1, 2):
        answer = await client.post("/v1/completions", json={**body, "prompt": [body["prompt"]] * prompts})
        assert len(answer.json()["choices"]) == prompts, answer.text
        assert len(told) == prompts - 1


def test_a_long_event_is_one_event() -> None:
    first, others = ServerSentEvent(lambda: iter([b"[1,", b"2]"]), "3", "name").encoded()
    assert first + b"".join(others) == b"id: 3\nevent: name\ndata: [1,2]\n\n"
    assert ServerSentEvent("[1]").encoded()[0] == b"data: [1]\n\n"


async def test_of_many_answers_that_are_told_again_little_lies_there(
    client_of: Callable[..., httpx.AsyncClient], metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 64 answers each had made 256 steps before its client took any: 45 MiB for each slow client, as
    objects, and full rounds of the garbage collector had stopped a router for seconds."""
    answers, made = 16, 0
    runner = ScriptedRunner(served(TOKENIZER, max_context=2 * LONG), committed)
    body = {"prompt": "a", "n": answers, "max_tokens": LONG, "logprobs": 1, "stream": True}
    await client_of(runner).post("/v1/completions", json=body)
    first = next(iter(runner.logs))
    add = Output.add

    def counted(*given: Any) -> Chunk:
        nonlocal made
        made += 1
        return add(*given)

    def start(session: GenerationRequest) -> AsyncGenerator[SessionEvent, None]:
        assert session.session_id is not None
        return runner.resume(session.session_id)

    monkeypatch.setattr(Output, "add", counted)
    with Threads().retelling("") as place:
        _, generation = await recalled(runner, first, place)
        items = generate_all(start, runner.together, generation, metrics, [0] * answers, place)
        async with aclosing(items):
            async for _, item in items:
                if isinstance(item, Chunk):
                    break
            await asyncio.sleep(0.05)
    assert answers <= made <= GROUP_NUMBERS / 3 + 2 * group(answers, 1) < answers * LONG


@pytest.mark.parametrize(
    ("answers", "logprobs", "steps"),
    [(1, None, GROUP), (1, 20, 186), (64, None, 64), (64, 20, 2), (128, 20, 1), (128, None, 32)],
)
def test_how_much_of_a_log_is_told_at_once(answers: int, logprobs: int | None, steps: int) -> None:
    assert group(answers, logprobs) == steps
