from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import pytest

from outrider.errors import OutriderError, Unavailable
from outrider.wire.session import FinishReason, new_session_id
from router.api import schema
from router.api.generate import generate, generate_all
from router.api.output import Chunk, Result
from router.api.record import named
from router.api.validation import Generation, prepare
from router.metrics import Metrics
from router.requests import (
    GenerationRequest,
    ServedModel,
    SessionBegun,
    SessionEnded,
    SessionEvent,
    TokensCommitted,
)
from tests.router.api.scripted import EOS, ScriptedRunner, byte_level, served, steps, until

TOKENIZER = byte_level()
MODEL = served(TOKENIZER)
END = TOKENIZER.token_to_id(EOS)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def generation(model: ServedModel = MODEL, **fields: object) -> Generation:
    body = schema.parse(schema.CompletionRequest, {"prompt": "the fox", **fields})
    return prepare(body, model, lambda limit: 0)


async def items_of(
    runner: ScriptedRunner, made: Generation, metrics: Metrics
) -> AsyncGenerator[Chunk | Result, None]:
    """Yields the items of its one session, after the one that says that it has begun."""
    (session,) = made.sessions
    async with aclosing(generate(runner.run(session), made, session, metrics)) as items:
        assert await anext(items) == (0, SessionBegun())
        async for index, item in items:
            assert index == 0
            assert not isinstance(item, SessionBegun)
            yield item


async def run(
    script: list[SessionEvent | Exception | None], metrics: Metrics, **fields: object
) -> tuple[list[Chunk], Result, ScriptedRunner]:
    runner, made = ScriptedRunner(MODEL, lambda request: script), generation(**fields)
    *chunks, result = [item async for item in items_of(runner, made, metrics)]
    assert isinstance(result, Result) and all(isinstance(chunk, Chunk) for chunk in chunks)
    return chunks, result, runner  # type: ignore[return-value]


def whole(chunks: list[Chunk], result: Result) -> str:
    return "".join(chunk.text for chunk in chunks) + result.text


@pytest.mark.parametrize("width", [1, 3, 50])
async def test_text_tokens_usage_and_statistics(width: int, metrics: Metrics) -> None:
    text = "naïve café, 中文 and 😀👍🏽"
    ids = ids_of(text)
    chunks, result, _ = await run(steps(ids, width), metrics)
    assert whole(chunks, result) == text
    assert not any("\ufffd" in chunk.text for chunk in chunks)
    assert [id for chunk in chunks for id in chunk.token_ids] == ids
    assert result.finish_reason is FinishReason.LENGTH
    assert result.usage.completion_tokens == len(ids)
    assert result.usage.prompt_tokens == len(TOKENIZER.encode("the fox").ids)
    assert result.usage.cached_prompt_tokens == 3
    assert result.speculation.steps == (0 if width == 1 else -(-len(ids) // width))


@pytest.mark.parametrize("width", [1, 2, 4, 50])
async def test_a_stop_string_ends_text_count_and_session_at_its_last_token(
    width: int, metrics: Metrics
) -> None:
    ids = ids_of("the quick STOP there")
    through = next(n for n in range(len(ids) + 1) if "STOP" in TOKENIZER.decode(ids[:n]))
    chunks, result, runner = await run([*steps(ids, width)[:-1], None], metrics, stop=["STOP", "zzz"])
    assert whole(chunks, result) == "the quick "
    assert result.finish_reason is FinishReason.STOP
    assert result.usage.completion_tokens == through
    assert [id for chunk in chunks for id in chunk.token_ids] == ids[:through]
    assert runner.open == 0


async def test_what_only_began_like_a_stop_string_comes_at_the_end(metrics: Metrics) -> None:
    chunks, result, _ = await run(steps(ids_of("the fox STO")), metrics, stop="STOP")
    assert whole(chunks, result) == "the fox STO"
    assert result.finish_reason is FinishReason.LENGTH


async def test_a_stop_string_completed_only_by_the_last_broken_character(metrics: Metrics) -> None:
    broken = [TOKENIZER.token_to_id(c) for c in "aðŁ"]
    chunks, result, _ = await run(steps(broken), metrics, stop="\ufffd")
    assert whole(chunks, result) == "a"
    assert result.finish_reason is FinishReason.STOP


async def test_the_token_that_ends_the_text_is_counted_and_not_shown(metrics: Metrics) -> None:
    # An end-of-text token need not be a special one: its text must not show either way.
    ordinary = TOKENIZER.token_to_id("w→rd")
    made = generation(replace(MODEL, eos_token_ids=frozenset({END, ordinary})))
    for end in (END, ordinary):
        events: list[SessionEvent] = [
            TokensCommitted((*ids_of("the fox"), end), 0, 0),
            SessionEnded(FinishReason.STOP),
        ]
        runner = ScriptedRunner(MODEL, lambda request, events=events: events)
        chunk, result = [item async for item in items_of(runner, made, metrics)]
        assert isinstance(chunk, Chunk) and isinstance(result, Result)
        assert chunk.text == "the fox" and chunk.token_ids[-1] == end
        assert result.usage.completion_tokens == len(chunk.token_ids)


async def test_with_ignore_eos_an_ordinary_end_token_is_text(metrics: Metrics) -> None:
    ordinary = TOKENIZER.token_to_id("w→rd")
    made = generation(replace(MODEL, eos_token_ids=frozenset({ordinary})), ignore_eos=True)
    runner = ScriptedRunner(MODEL, lambda request: steps([ordinary, *ids_of("x")], 2))
    chunks = [item async for item in items_of(runner, made, metrics)]
    assert isinstance(chunks[0], Chunk) and chunks[0].text == "w→rdx"


async def test_an_error_keeps_what_was_given_before_and_counts_as_one(metrics: Metrics) -> None:
    script = [*steps(ids_of("the fox"))[:-1], Unavailable("the verifier was lost")]
    runner, made, text = ScriptedRunner(MODEL, lambda request: script), generation(), ""
    with pytest.raises(Unavailable):
        async for item in items_of(runner, made, metrics):
            assert isinstance(item, Chunk)
            text += item.text
    assert text == "the fox"
    labels = {"model_name": "demo", "finished_reason": "error"}
    assert metrics.registry.get_sample_value("vllm:request_success_total", labels) == 1


async def test_a_session_without_an_end_is_an_error(metrics: Metrics) -> None:
    with pytest.raises(OutriderError, match="ended without a reason"):
        await run(steps(ids_of("x"))[:-1], metrics)


async def test_closing_closes_every_session(metrics: Metrics) -> None:
    runner = ScriptedRunner(MODEL, lambda request: [*steps(ids_of("x"))[:-1], None])
    made = generation(prompt=["the", "fox", "jumps"])
    async with aclosing(generate_all(runner.run, runner.together, made, metrics)) as items:
        await anext(items)
        await until(lambda: runner.open == 3)
    assert runner.open == 0
    labels = {"model_name": "demo", "finished_reason": "abort"}
    assert metrics.registry.get_sample_value("vllm:request_success_total", labels) == 3


async def test_all_sessions_are_kept_as_long_as_one_goes_on(metrics: Metrics) -> None:
    """Else one that is over is forgotten while its companions go on, and their client cannot resume."""
    made = named(generation(prompt=["the", "fox"]), new_session_id())
    script = {made.sessions[0].params.prompt: steps(ids_of("x")), made.sessions[1].params.prompt: [None]}
    runner = ScriptedRunner(MODEL, lambda request: script[request.params.prompt])
    ids = [session.session_id for session in made.sessions]
    async with aclosing(generate_all(runner.run, runner.together, made, metrics)) as items:
        async for _, item in items:
            if isinstance(item, Result):
                break
        await runner.waiting.wait()
        assert runner.kept == ids
    assert runner.kept == []


async def test_sessions_run_side_by_side_and_one_error_ends_all(metrics: Metrics) -> None:
    made = generation(prompt=["the", "fox"])
    both = asyncio.Barrier(2)

    class Together(ScriptedRunner):
        async def run(self, request, answer=b""):  # type: ignore[no-untyped-def]
            await both.wait()
            async with aclosing(super().run(request, answer)) as events:
                async for event in events:
                    yield event

    def script(request: object) -> list[SessionEvent | Exception | None]:
        if request is made.sessions[0]:
            return [Unavailable("lost")]
        return [*steps(ids_of("x"))[:-1], None]

    runner = Together(MODEL, script)
    with pytest.raises(Unavailable):
        async for _ in generate_all(runner.run, runner.together, made, metrics):
            pass
    assert runner.open == 0


async def test_nothing_comes_before_all_sessions_have_begun(metrics: Metrics) -> None:
    """The first event tells the id by which all of them are resumed."""
    made, may_begin, said = generation(prompt=["the", "fox"]), asyncio.Event(), asyncio.Event()

    async def start(session: GenerationRequest) -> AsyncGenerator[SessionEvent, None]:
        if session is made.sessions[1]:
            await may_begin.wait()
        said.set()
        yield SessionBegun()
        for event in steps(ids_of("fox")):
            yield event

    async with aclosing(
        generate_all(start, ScriptedRunner(MODEL, lambda request: ()).together, made, metrics)
    ) as items:
        first = asyncio.ensure_future(anext(items))
        await said.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not first.done()
        may_begin.set()
        told = [await first, *[item async for item in items]]
        assert [isinstance(item, SessionBegun) for _, item in told].index(True) == 0, "whoever begins last"
        assert [index for index, _ in told].count(1) > 1
