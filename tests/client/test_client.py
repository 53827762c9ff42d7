"""outrider.client against routers' HTTP applications, over connections that break."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Sequence
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import Response, StreamingResponse

from outrider.client import LONGEST_PAUSE_SECONDS, SILENCE_SECONDS, Client, Statistics
from outrider.errors import InvalidRequest, OutriderError, Overloaded, StartupError, Superseded, Unavailable
from router.api.connection import KEEP_ALIVE_SECONDS
from router.requests import GenerationRequest, SessionEvent
from tests.client.conftest import Between, Serve, ServeApp
from tests.router.api.scripted import Logs, ScriptedRunner, byte_level, served, steps, until

TOKENIZER = byte_level()
MODEL = served(TOKENIZER, max_context=512)
TEXT = "naïve café, 中文 and 😀👍🏽 STOP there, said the \u2028\x85 fox "
IDS = TOKENIZER.encode(TEXT, add_special_tokens=False).ids
REQUEST = {"prompt": "the fox", "max_tokens": 300}
PATH = "/v1/completions"


def answering(logs: Logs | None = None, width: int = 3, **settings: Any) -> ScriptedRunner:
    return ScriptedRunner(MODEL, lambda request: steps(IDS, width), logs, **settings)


def failing(errors: Sequence[Exception], after: int = 0, logs: Logs | None = None) -> ScriptedRunner:
    """Raises each of the errors once, after so many tokens; then answers."""
    left = list(errors)

    def script(request: GenerationRequest) -> Sequence[SessionEvent | Exception | None]:
        return [*steps(IDS, 1)[:after], left.pop(0)] if left else steps(IDS, 1)

    return ScriptedRunner(MODEL, script, logs)


def told(client: Client, request: dict[str, Any] = REQUEST, path: str = PATH) -> tuple[str, Statistics]:
    with client:
        *pieces, statistics = client.stream(path, request)
    assert isinstance(statistics, Statistics)
    return "".join(map(str, pieces)), statistics


def hasty(urls: str | Sequence[str], **settings: Any) -> Client:
    """Comes back at once."""
    return Client(urls, sleep=lambda seconds: None, **settings)


@pytest.fixture
def refused() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
async def test_each_piece_once_over_connections_that_break_anywhere(
    serve: Serve, between: Between, seed: int, path: str
) -> None:
    rng = random.Random(seed)
    logs: Logs = {}
    # Some connections break before the head of the response has passed, most in the middle of an event.
    urls, proxies = [], []
    for width in (1, 3):
        proxy, url = await between(
            await serve(answering(logs, width, forgets=rng.randrange(4))), lambda: rng.randrange(0, 1500)
        )
        urls.append(url)
        proxies.append(proxy)
    request = (
        REQUEST if path == PATH else {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 300}
    )
    text, statistics = await asyncio.to_thread(told, hasty(urls), request, path)
    assert text == TEXT
    assert statistics.completion_tokens == len(IDS)
    assert sum(proxy.cuts for proxy in proxies) > 3


async def test_a_router_that_dies(serve: Serve, between: Between) -> None:
    logs: Logs = {}
    dying = ScriptedRunner(MODEL, lambda request: [*steps(IDS, 2)[:4], None], logs)
    proxy, url = await between(await serve(dying))
    other = answering(logs, 2)
    asking = asyncio.create_task(asyncio.to_thread(told, Client([url, await serve(other)])))
    await dying.waiting.wait()
    proxy.kill()
    text, statistics = await asking
    assert text == TEXT and statistics.completion_tokens == len(IDS)
    assert other.requests == [], "it went on there; it was not asked for again"


async def test_what_two_routers_ended_with_is_sent_to_no_third(serve: Serve, between: Between) -> None:
    urls = []
    dying = [ScriptedRunner(MODEL, lambda request: [None]) for _ in range(2)]
    proxies = []
    for runner in dying:
        proxy, url = await between(await serve(runner))
        urls.append(url)
        proxies.append(proxy)
    third = answering()
    asking = asyncio.create_task(asyncio.to_thread(told, hasty([*urls, await serve(third)])))
    for runner, proxy in zip(dying, proxies, strict=True):
        await runner.waiting.wait()
        proxy.kill()
    with pytest.raises(Unavailable, match="2 servers in a row ended when they were asked for this"):
        await asking
    assert third.requests == []


async def test_a_lost_log_is_made_again_from_the_same_seed(serve: Serve, between: Between) -> None:
    dying = ScriptedRunner(MODEL, lambda request: [*steps(IDS, 2)[:4], None])
    proxy, url = await between(await serve(dying))
    other = answering(width=5)
    asking = asyncio.create_task(asyncio.to_thread(told, Client([url, await serve(other)])))
    await dying.waiting.wait()
    proxy.kill()
    text, statistics = await asking
    assert text == TEXT
    ((first,), (second,)) = dying.requests, other.requests
    assert first.params.sampling.seed == second.params.sampling.seed == statistics.seed != 4711


async def test_another_text_in_its_place_is_an_error(serve: Serve, between: Between) -> None:
    dying = ScriptedRunner(MODEL, lambda request: [*steps(IDS, 2)[:4], None])
    proxy, url = await between(await serve(dying))
    other = ScriptedRunner(MODEL, lambda request: steps(IDS[3:]))
    asking = asyncio.create_task(asyncio.to_thread(told, Client([url, await serve(other)])))
    await dying.waiting.wait()
    proxy.kill()
    with pytest.raises(OutriderError, match="begun again, and became another"):
        await asking


@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize(
    "error", [Unavailable("lost"), Overloaded("busy"), Superseded("elsewhere")], ids=lambda e: e.kind
)
async def test_refusals_for_now_are_overcome(serve: Serve, error: Exception, after: int) -> None:
    runner = failing([error] * 3, after)
    text, _ = await asyncio.to_thread(told, hasty(await serve(runner)))
    assert text == TEXT
    assert len(runner.requests) == (1 if after else 4)


async def test_it_waits_as_long_as_the_router_asks(serve: Serve) -> None:
    pauses: list[float] = []
    runner = failing([Overloaded("busy", retry_after=7), Unavailable("lost")])
    client = Client(await serve(runner), sleep=pauses.append, uniform=lambda low, high: high)
    assert (await asyncio.to_thread(told, client))[0] == TEXT
    assert pauses == [7.2, 1.4]


async def test_patience_ends_and_pauses_are_bounded(serve: Serve) -> None:
    now, bounds = [0.0], []

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def uniform(low: float, high: float) -> float:
        bounds.append((low, high))
        return high

    url = await serve(failing([Unavailable("the verifier was lost")] * 1000, 4))
    client = Client(url, patience_seconds=40, clock=lambda: now[0], sleep=sleep, uniform=uniform)
    with client, pytest.raises(Unavailable, match="the verifier was lost"):
        await asyncio.to_thread(list, client.stream(PATH, REQUEST))
    assert 30 < now[0] <= 40
    assert bounds[0] == (0, 0.2) and bounds[1] == (0, 0.4)
    assert max(high for _, high in bounds) == LONGEST_PAUSE_SECONDS
    assert len(bounds) < 20


async def test_progress_renews_the_patience(serve: Serve, between: Between) -> None:
    """A connection a piece: more failures together than the patience allows without a piece between them."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += 3

    _, url = await between(await serve(answering(width=1)), lambda: 900)
    client = Client(url, patience_seconds=4, clock=lambda: now[0], sleep=sleep, uniform=lambda low, high: 0.0)
    assert (await asyncio.to_thread(told, client))[0] == TEXT
    assert now[0] > 30


async def test_a_router_that_was_there_is_waited_for(serve: Serve, between: Between) -> None:
    dying = ScriptedRunner(MODEL, lambda request: [*steps(IDS)[:4], None])
    proxy, url = await between(await serve(dying))
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    client = Client(url, patience_seconds=30, clock=lambda: now[0], sleep=sleep, uniform=lambda _, high: high)
    asking = asyncio.create_task(asyncio.to_thread(told, client))
    await dying.waiting.wait()
    proxy.kill()
    with pytest.raises(Unavailable, match="no server answers"):
        await asking
    assert 20 < now[0] <= 30


async def test_an_answer_without_ids_is_not_asked_for_again(serve_app: ServeApp) -> None:
    app, asked = FastAPI(), []

    @app.post(PATH)
    def answer() -> StreamingResponse:
        asked.append(1)
        return StreamingResponse(iter([b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n']))

    with pytest.raises(Unavailable, match="broke before the answer was complete"):
        await asyncio.to_thread(told, hasty(await serve_app(app)))
    assert len(asked) == 1


async def test_of_a_complete_answer_nothing_more_is_asked_where_only_its_end_is_cut_off(
    serve_app: ServeApp,
) -> None:
    app = FastAPI()
    chunk = {"choices": [{"index": 0, "text": "a"}], "usage": {"completion_tokens": 1}, "seed": 5}

    @app.post(PATH)
    def answer() -> StreamingResponse:
        return StreamingResponse(iter([f"id: {'00' * 16}:1\ndata: {json.dumps(chunk)}\n\n".encode()]))

    pauses: list[float] = []
    client = Client(await serve_app(app), sleep=pauses.append)
    text, statistics = await asyncio.to_thread(told, client)
    assert (text, statistics.completion_tokens, pauses) == ("a", 1, [])


async def test_no_router_is_said_at_once(refused: str) -> None:
    with pytest.raises(Unavailable, match=f"no server answers at {refused} or {refused}: start one"):
        told(Client([refused, refused], patience_seconds=1e9))


async def test_the_first_router_may_be_away(serve: Serve, refused: str) -> None:
    text, _ = await asyncio.to_thread(told, hasty([refused, refused, await serve(answering())]))
    assert text == TEXT


async def test_a_router_that_hangs_is_left(serve: Serve) -> None:
    runner = answering()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        urls = [f"http://127.0.0.1:{silent.getsockname()[1]}", await serve(runner)]
        assert (await asyncio.to_thread(told, Client(urls, silence_seconds=0.2)))[0] == TEXT


def test_a_router_is_given_twice_the_time_between_its_signs_of_life() -> None:
    assert SILENCE_SECONDS == 2 * KEEP_ALIVE_SECONDS


@pytest.mark.parametrize(
    ("request_", "message"), [({"prompt": ""}, "prompt is empty"), ({"prompt": "x", "model": "y"}, "'y'")]
)
async def test_what_is_wrong_is_not_tried_again(serve: Serve, request_: dict[str, Any], message: str) -> None:
    pauses: list[float] = []
    client = Client(await serve(answering()), sleep=pauses.append)
    with pytest.raises(InvalidRequest, match=message):
        await asyncio.to_thread(told, client, request_)
    assert pauses == []


async def test_an_error_that_is_final_ends_the_answer(serve: Serve) -> None:
    pauses: list[float] = []
    client = Client(await serve(failing([ZeroDivisionError("secret")], 3)), sleep=pauses.append)
    with pytest.raises(OutriderError, match="the server failed to answer this request"):
        await asyncio.to_thread(told, client)
    assert pauses == []


async def test_who_stops_listening_closes_the_session(serve: Serve) -> None:
    runner = ScriptedRunner(MODEL, lambda request: [*steps(IDS)[:4], None])
    url = await serve(runner)

    def one_piece() -> None:
        with Client(url) as client:
            next(client.stream(PATH, REQUEST))

    await asyncio.to_thread(one_piece)
    await until(lambda: runner.open == 0 and len(runner.requests) == 1)


async def test_several_prompts_go_on_too(serve: Serve, between: Between) -> None:
    rng = random.Random(1)
    _, url = await between(await serve(answering({})), lambda: rng.randrange(300, 1500))
    request = {**REQUEST, "prompt": ["a", "b", "c"]}
    text, statistics = await asyncio.to_thread(told, hasty(url), request)
    assert sorted(text) == sorted(TEXT * 3)
    assert statistics.completion_tokens == 3 * len(IDS)


@pytest.mark.parametrize("key", ["sk-\n", "sk- ", "schlüssel"])
def test_a_key_that_is_none(key: str) -> None:
    with pytest.raises(StartupError, match="was it copied whole"):
        Client("http://h", api_key=key)


def test_a_file_of_authorities_that_is_none(tmp_path: Any) -> None:
    (tmp_path / "ca.pem").write_text("nonsense")
    for name in ("ca.pem", "absent.pem"):
        with pytest.raises(StartupError, match=f"no certificates can be read from .*{name}"):
            Client("https://h", ca_file=tmp_path / name)


@pytest.mark.parametrize(
    ("sent", "headers"),
    [
        (b"data: \xff\n\n", {}),
        (b"data: " + b"[" * 100_000 + b"\n\n", {}),
        (b'data: {"choices":[],"usage":5}\n\ndata: [DONE]\n\n', {}),
        (b'data: {"choices":[],"usage":{"completion_tokens":"x"}}\n\ndata: [DONE]\n\n', {}),
        (b'data: {"choices":[],"usage":{"completion_tokens":1},"metrics":[1]}\n\ndata: [DONE]\n\n', {}),
        (b"no gzip", {"content-encoding": "gzip"}),
    ],
)
async def test_a_server_that_speaks_nonsense(
    serve_app: ServeApp, sent: bytes, headers: dict[str, str]
) -> None:
    app = FastAPI()

    @app.post(PATH)
    async def answer() -> Response:
        return Response(sent, headers=headers)

    client = hasty(await serve_app(app), patience_seconds=0.1)
    with pytest.raises(OutriderError, match=r"is it Outrider|broke before"):
        await asyncio.to_thread(told, client)
