"""Through real sockets: disconnects, large bodies, and the official client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import openai
import pytest

from outrider.errors import Overloaded, Unavailable
from router.metrics import Metrics
from router.requests import SessionRunner
from tests.router.api.scripted import ScriptedRunner, byte_level, served, steps, until

TOKENIZER = byte_level()
MODEL = served(TOKENIZER)
TEXT = "naïve 😀 fox STOP there"
IDS = TOKENIZER.encode(TEXT, add_special_tokens=False).ids

Serve = Callable[[SessionRunner], Awaitable[str]]


def official(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("prompt", ["x", ["x", "y", "z"]], ids=["one", "three"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens", [0, 4], ids=["before the first token", "in the middle"])
async def test_a_client_that_leaves_closes_its_sessions(
    serve: Serve, metrics: Metrics, prompt: str | list[str], stream: bool, tokens: int
) -> None:
    runner = ScriptedRunner(MODEL, lambda request: [*steps(IDS)[:tokens], None])
    url = await serve(runner)
    async with httpx.AsyncClient(timeout=None) as client:
        request = client.build_request(
            "POST", f"{url}/v1/completions", json={"prompt": prompt, "stream": stream}
        )
        sending = asyncio.create_task(client.send(request, stream=True))
        sessions = 1 if isinstance(prompt, str) else len(prompt)
        await until(lambda: runner.open == sessions and runner.waiting.is_set())
        sending.cancel()
        if stream and tokens:  # then the answer had begun
            response = (await asyncio.gather(sending, return_exceptions=True))[0]
            if isinstance(response, httpx.Response):
                await response.aclose()
    await until(lambda: runner.open == 0)
    labels = {"model_name": "demo", "finished_reason": "abort"}
    await until(lambda: metrics.registry.get_sample_value("vllm:request_success_total", labels) == sessions)
    assert (await httpx.AsyncClient().get(f"{url}/health")).status_code == 200


async def test_a_client_that_leaves_while_the_stream_is_running(serve: Serve) -> None:
    runner = ScriptedRunner(MODEL, lambda request: steps(IDS * 5_000))
    url = await serve(runner)
    async with (
        httpx.AsyncClient() as client,
        client.stream("POST", f"{url}/v1/completions", json={"prompt": "x", "stream": True}) as response,
    ):
        async for _ in response.aiter_lines():
            break
        assert runner.open == 1
    await until(lambda: runner.open == 0)


@pytest.mark.parametrize("length_is_known", [True, False])
async def test_a_client_sees_that_its_body_is_over_the_limit(serve: Serve, length_is_known: bool) -> None:
    url = await serve(ScriptedRunner(MODEL, lambda request: steps(IDS)))
    piece = b" " * 2**20

    async def pieces():  # type: ignore[no-untyped-def]
        for _ in range(10):
            yield piece

    content = piece * 10 if length_is_known else pieces()
    async with httpx.AsyncClient() as client:
        response = await client.post(f"{url}/v1/completions", content=content)
    assert response.status_code == 413
    assert "over the limit of 8388608 bytes" in response.json()["error"]["message"]


async def test_the_official_client_completes(serve: Serve) -> None:
    client = official(await serve(ScriptedRunner(MODEL, lambda request: steps(IDS, 4))))
    assert [model.id for model in (await client.models.list()).data] == ["demo"]
    whole = await client.completions.create(model="demo", prompt="the fox", max_tokens=20, stop=["STOP"])
    assert whole.choices[0].text == "naïve 😀 fox "
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 3
    assert whole.metrics["speculative_decoding"]["num_draft_tokens"] > 0  # type: ignore[attr-defined]
    stream = await client.completions.create(model="demo", prompt=["a", "b"], stream=True)
    texts = ["", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [TEXT, TEXT]


async def test_the_official_client_chats(serve: Serve) -> None:
    client = official(await serve(ScriptedRunner(MODEL, lambda request: steps(IDS, 4))))
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    whole = await client.chat.completions.create(
        model="demo", messages=messages, seed=7, extra_body={"num_speculative_tokens": 3, "top_k": 5}
    )
    assert whole.choices[0].message.content == TEXT
    assert whole.seed == 7  # type: ignore[attr-defined]
    stream = await client.chat.completions.create(
        model="demo", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == len(IDS)


async def test_the_official_client_sees_errors_as_its_own_kinds(serve: Serve) -> None:
    errors: list[Exception] = [Overloaded("come back later")]
    client = official(await serve(ScriptedRunner(MODEL, lambda request: [*steps(IDS)[:3], *errors])))
    with pytest.raises(openai.NotFoundError, match="'other'"):
        await client.completions.create(model="other", prompt="x")
    with pytest.raises(
        openai.BadRequestError, match="has no tokens for a text between two others"
    ) as refused:
        await client.completions.create(model="demo", prompt="x", suffix="y")
    assert refused.value.param == "suffix"
    with pytest.raises(openai.RateLimitError, match="come back later"):
        await client.completions.create(model="demo", prompt="x")
    errors[:] = [Unavailable("the verifier was lost")]
    with pytest.raises(openai.APIError, match="the verifier was lost"):
        async for _ in await client.completions.create(model="demo", prompt="x", stream=True):
            pass
