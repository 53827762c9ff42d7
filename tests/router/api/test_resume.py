"""An answer that goes on: what a client has and what it gets afterwards are the whole, wherever it broke."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import InvalidRequest
from outrider.wire.session import FinishReason, SessionId, SessionParams
from router.api import schema
from router.api.connection import ServerSentEvent
from router.api.generate import generate, generate_all
from router.api.output import Chunk, Result
from router.api.position import (
    check,
    companion,
    event_id,
    parse_event_id,
    parse_id,
    parse_position,
)
from router.api.record import Record
from router.api.responses import SHAPES, Envelope
from router.api.stream import DONE, events
from router.api.validation import Generation, prepare
from router.metrics import Metrics
from router.requests import GenerationRequest, SessionEnded, SessionEvent, TokensCommitted
from tests.router.api.scripted import EOS, byte_level, sentencepiece, served

BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()
MODELS = [served(tokenizer, max_context=512) for tokenizer in (BYTE_LEVEL, SENTENCEPIECE)]
ID = SessionId(bytes(range(16)))
SIZES = st.integers(1, 6)


def cut_into_steps(tokens: Sequence[int], widths: Sequence[int], reason: FinishReason) -> list[SessionEvent]:
    """Steps of these widths, over and over."""
    made: list[SessionEvent] = []
    start = 0
    while start < len(tokens):
        width = widths[len(made) % len(widths)]
        part = tuple(tokens[start : start + width])
        made.append(TokensCommitted(part, len(part) - 1, width - 1, 2 if start == 0 else 0))
        start += width
    return [*made, SessionEnded(reason)]


@st.composite
def answers(draw: st.DrawFn) -> tuple[Generation, list[int], FinishReason]:
    """A request and the tokens of its answer: broken characters, stop strings anywhere, an end of text."""
    model = draw(st.sampled_from(MODELS))
    tokenizer = BYTE_LEVEL if model is MODELS[0] else SENTENCEPIECE
    vocabulary = st.integers(0, tokenizer.get_vocab_size() - 1).filter(
        lambda id: id not in model.eos_token_ids
    )
    words = st.sampled_from(["the fox ", "naïve 😀", "STOP", "中文", "aab", " "]).map(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    )
    parts = draw(st.lists(st.one_of(words, vocabulary.map(lambda id: [id])), min_size=1, max_size=8))
    tokens = [id for part in parts for id in part]
    reason = FinishReason.LENGTH
    if draw(st.booleans()):
        tokens, reason = [*tokens, tokenizer.token_to_id(EOS)], FinishReason.STOP
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    places = st.tuples(st.integers(0, len(text)), st.integers(1, 4)).map(lambda at: text[at[0] :][: at[1]])
    stops = draw(st.lists(st.one_of(places, st.sampled_from(["STOP", "ab", "\ufffd"])), max_size=2))
    fields: dict[str, object] = {"prompt": [5], "stop": [stop for stop in stops if stop], "max_tokens": 400}
    return prepare(schema.parse(schema.CompletionRequest, fields), model, lambda limit: 0), tokens, reason


async def replayed(steps: Sequence[SessionEvent]):  # type: ignore[no-untyped-def]
    for step in steps:
        yield step


def told(
    generation: Generation,
    steps: Sequence[SessionEvent],
    shape: str,
    after: tuple[int, ...] | None = None,
) -> list[ServerSentEvent]:
    async def all_of_it() -> list[ServerSentEvent]:
        items = generate_all(lambda session: replayed(steps), asyncio.sleep, generation, Metrics(), after)
        stream = events(
            items,
            Envelope(SHAPES[shape], ID, 1, "demo", 0),
            [1],
            include_usage=True,
            continuous_usage_stats=True,
            after=after,
        )
        return [event async for event in stream]

    return asyncio.run(all_of_it())


def text_of(stream: Sequence[ServerSentEvent]) -> str:
    choices = [choice for event in stream[:-1] for choice in json.loads(event.data)["choices"]]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices
    )


@settings(max_examples=150)
@given(answers(), st.lists(SIZES, min_size=1, max_size=4), st.sampled_from(["completion", "chat"]))
def test_after_every_event_comes_what_came_after_it(
    answer: tuple[Generation, list[int], FinishReason], widths: list[int], shape: str
) -> None:
    generation, tokens, reason = answer
    steps = cut_into_steps(tokens, widths, reason)
    whole = told(generation, steps, shape)
    assert whole[-1] is DONE
    for at, event in enumerate(whole):
        if event.id is not None:
            session_id, position = parse_event_id(event.id)
            assert session_id == ID
            assert told(generation, steps, shape, position) == whole[at + 1 :]
    ids = [event.id for event in whole if event.id is not None]
    assert len(ids) == len(whole) - 2 == len(set(ids)), "usage and [DONE] alone have none"


@settings(max_examples=150)
@given(answers(), st.lists(SIZES, min_size=1, max_size=4), st.lists(SIZES, min_size=1, max_size=4))
def test_after_every_token_comes_the_rest_however_the_steps_are_cut_now(
    answer: tuple[Generation, list[int], FinishReason], widths: list[int], other_widths: list[int]
) -> None:
    """The log is lost, and the session computed again with other drafts: other steps, the same tokens."""
    generation, tokens, reason = answer
    singly = told(generation, cut_into_steps(tokens, [1], reason), "completion")
    before = told(generation, cut_into_steps(tokens, widths, reason), "completion")
    assert text_of(singly) == text_of(before)
    again = cut_into_steps(tokens, other_widths, reason)
    length = json.loads(singly[-2].data)["usage"]["completion_tokens"]
    for after in range(length + 2):
        has = [event for event in singly if event.id and parse_event_id(event.id)[1][0] <= after]
        rest = told(generation, again, "completion", (after,))
        assert text_of([*has, DONE]) + text_of(rest) == text_of(singly)
        usage = json.loads(rest[-2].data)["usage"]
        assert usage["completion_tokens"] == length
        ends = [choice for event in rest[:-1] for choice in json.loads(event.data)["choices"]]
        assert [choice["finish_reason"] for choice in ends[-1:]] == (
            [json.loads(singly[-3].data)["choices"][0]["finish_reason"]] if after <= length else []
        )


@settings(max_examples=100)
@given(answers(), st.lists(SIZES, min_size=1, max_size=4), st.data())
def test_tokens_go_on_where_they_broke_off(
    answer: tuple[Generation, list[int], FinishReason], widths: list[int], data: st.DataObject
) -> None:
    """What gRPC tells: ids and text of each step, without a gap or a repetition."""
    generation, tokens, reason = answer
    (session,) = generation.sessions

    def items(after: int | None) -> list[Chunk | Result]:
        async def run() -> list[Chunk | Result]:
            steps = replayed(cut_into_steps(tokens, widths, reason))
            return [item async for _, item in generate(steps, generation, session, Metrics(), after)]

        return asyncio.run(run())

    *whole, end = items(None)
    after = data.draw(st.sampled_from([chunk.position for chunk in whole if isinstance(chunk, Chunk)]))
    *rest, same_end = items(after)
    assert rest == [chunk for chunk in whole if chunk.position > after]
    assert same_end == end


def test_what_is_silently_replayed_is_not_measured_again() -> None:
    generation = prepare(
        schema.parse(schema.CompletionRequest, {"prompt": [5], "max_tokens": 20}), MODELS[0], lambda limit: 0
    )
    steps = cut_into_steps(list(range(60, 72)), [3], FinishReason.LENGTH)
    metrics = Metrics()

    async def run() -> None:
        async for _ in generate(replayed(steps), generation, generation.sessions[0], metrics, 6):
            pass

    asyncio.run(run())

    def value(name: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"model_name": "demo"})

    assert value("vllm:generation_tokens_total") == 6
    assert value("vllm:prompt_tokens_total") is None
    assert value("vllm:time_to_first_token_seconds_count") is None
    assert value("vllm:inter_token_latency_seconds_count") == 3


@given(st.binary(min_size=16, max_size=16), st.lists(st.integers(0, 10**9 - 1), min_size=1, max_size=4))
def test_an_event_id_tells_session_and_position(raw: bytes, position: list[int]) -> None:
    assert parse_event_id(event_id(SessionId(raw), position)) == (raw, tuple(position))


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "7", "x" * 9999, ID.hex(), f"{ID.hex()}:", f"{ID.hex()}:-1", f"{ID.hex()}:1,"),
        *(f"{ID.hex()}:1.5", f"{ID.hex()}0:1", f"{ID.hex()[1:]}:1", f" {ID.hex()}:1"),
        *(f"{ID.hex()}:{10**9}", f"{ID.hex()}:１"),
    ],
)
def test_what_is_no_event_id_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(InvalidRequest, match="as in 0123456789abcdef0123456789abcdef:17"):
        parse_event_id(text)


def test_an_id_is_taken_as_answers_have_it() -> None:
    assert {parse_id(prefix + ID.hex()) for prefix in ("", "cmpl-", "chatcmpl-")} == {ID}
    for text in ("", "cmpl-", "x-" + ID.hex(), ID.hex().upper(), ID.hex() + "\n"):
        with pytest.raises(InvalidRequest, match="32 hexadecimal digits"):
            parse_id(text)


def test_a_position_fits_its_sessions() -> None:
    sessions = [GenerationRequest("", SessionParams((1,), MODELS and _sampling(), most)) for most in (4, 9)]
    check((5, 10), sessions)  # the end counts as one
    for position in ((6, 10), (5, 11)):
        with pytest.raises(InvalidRequest, match="after must be at most"):
            check(position, sessions)
    for position in ((5,), (5, 5, 5)):
        with pytest.raises(InvalidRequest, match="must have 2 numbers"):
            check(position, sessions)
    for text in ("", "a", "1,,2", "-1"):
        with pytest.raises(InvalidRequest, match="must be a number of output tokens"):
            parse_position(text)


def _sampling():  # type: ignore[no-untyped-def]
    return (
        prepare(schema.parse(schema.CompletionRequest, {"prompt": [5]}), MODELS[0], lambda limit: 0)
        .sessions[0]
        .params.sampling
    )


def test_companions_are_told_apart_and_always_the_same() -> None:
    ids = [companion(ID, index) for index in range(128)]
    assert ids[0] == ID and len(set(ids)) == 128 and {len(id) for id in ids} == {16}
    assert ids == [companion(ID, index) for index in range(128)]


@given(st.lists(st.text(min_size=1), max_size=3), st.booleans())
def test_a_record_survives_the_log(stops: list[str], usage: bool) -> None:
    record = Record("chat", 12, 3, tuple(stops), include_usage=usage)
    assert Record.from_bytes(record.to_bytes()) == record


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"7", b"[]", b'{"stop": []}', b'{"shape": "chat", "stop": [], "x": 1}']
)
def test_what_is_no_record_is_none(raw: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        Record.from_bytes(raw)
