"""Reconnecting over HTTP, by either of its two ways, through this router or another."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import openai
import pytest

from outrider.errors import Unavailable
from router.api.access import Access, HttpAccess
from router.api.connection import KEEP_ALIVE
from router.api.http import create_app
from router.api.intake import Intake
from router.api.keys import ApiKey
from router.metrics import Metrics
from router.requests import GenerationRequest, SessionEvent
from tests.router.api.scripted import Logs, ScriptedRunner, byte_level, served, steps, until
from tests.router.api.test_http_server import Serve

TOKENIZER = byte_level()
MODEL = served(TOKENIZER)
TEXT = "naïve 😀 fox STOP there"
IDS = TOKENIZER.encode(TEXT, add_special_tokens=False).ids
COMPLETION = ("/v1/completions", {"prompt": "the fox", "max_tokens": 40})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
WORDED = {"stop": ["fox", "there"], "include_stop_str_in_output": True, "skip_special_tokens": False}
WORDED |= {"min_tokens": len(IDS) - 2}
UNKNOWN = "0" * 32

ClientOf = Callable[..., httpx.AsyncClient]
Ask = tuple[str, Mapping[str, Any]]


def answering(logs: Logs | None = None, width: int = 3, forgets: int = 0) -> ScriptedRunner:
    return ScriptedRunner(MODEL, lambda request: steps(IDS, width), logs, forgets)


def last_id(events: str) -> str:
    return events.rpartition("id: ")[2].partition("\n")[0]


def resuming(client: httpx.AsyncClient, ask: Ask, event_id: str) -> tuple[httpx.Request, httpx.Request]:
    path, body = ask
    session, _, after = event_id.partition(":")
    return (
        client.build_request("GET", f"/v1/sessions/{session}/events", params={"after": after}),
        client.build_request("POST", path, json=body, headers={"last-event-id": event_id}),
    )


@pytest.mark.parametrize(
    "fields",
    [{}, USAGE, {"seed": 7, "stop": ["STOP", "zzz"]}, WORDED],
    ids=["", "usage", "stop", "worded"],
)
@pytest.mark.parametrize("ask", [COMPLETION, CHAT], ids=["completion", "chat"])
async def test_another_router_gives_byte_for_byte_what_is_missing(
    client_of: ClientOf, ask: Ask, fields: dict[str, Any]
) -> None:
    logs: Logs = {}
    first = client_of(answering(logs))
    other = client_of(ScriptedRunner(MODEL, lambda request: steps(IDS, 3), logs), clock=lambda: 9999.0)
    ask = (ask[0], {**ask[1], **fields, "stream": True})
    whole = (await first.post(ask[0], json=ask[1])).text
    events = whole.split("\n\n")
    ids = [last_id(event) for event in events if event.startswith("id: ")]
    assert len(ids) > 3 and len(events) - len(ids) == 2 + bool(fields.get("stream_options"))
    for at, event_id in enumerate(ids):
        for request in resuming(other, ask, event_id):
            response = await other.send(request)
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert response.text == "\n\n".join(events[at + 1 :])
    beginning = await other.get(f"/v1/sessions/{ids[0].partition(':')[0]}/events")
    assert beginning.text == whole


async def test_the_id_in_the_answer_is_the_sessions(client_of: ClientOf) -> None:
    client = client_of(answering())
    for path, body in (COMPLETION, CHAT):
        whole = (await client.post(path, json=body)).json()
        stream = (await client.get(f"/v1/sessions/{whole['id']}/events")).text
        assert f'"id":"{whole["id"]}"' in stream
        assert last_id(stream).partition(":")[0] == whole["id"].partition("-")[2]
        assert f'"completion_tokens":{len(IDS)}' in stream, "usage, as in the whole answer"


async def test_several_prompts_go_on_each_where_it_was(client_of: ClientOf) -> None:
    def script(request: GenerationRequest) -> list[SessionEvent]:
        return steps(list(request.params.prompt) * 2, 1 + request.params.prompt[0] % 3)

    logs: Logs = {}
    body = {"prompt": [[60, 61, 62], [63, 64, 65], [67, 68]], "max_tokens": 9, "stream": True, **USAGE}
    ask = ("/v1/completions", body)
    client = client_of(ScriptedRunner(MODEL, script, logs))
    other = client_of(ScriptedRunner(MODEL, script, logs))
    events = (await client.post(ask[0], json=body)).text.split("\n\n")

    def texts(some: list[str]) -> list[list[str]]:
        told: list[list[str]] = [[], [], []]
        for event in some:
            if '"index":' in event:
                told[int(event.partition('"index":')[2][0])].append(event.partition("data: ")[2])
        return told

    whole = texts(events)
    for at, event in enumerate(events):
        if event.startswith("id: "):
            for request in resuming(other, ask, last_id(event)):
                rest = (await other.send(request)).text.split("\n\n")
                assert [
                    one + two for one, two in zip(texts(events[: at + 1]), texts(rest), strict=True)
                ] == whole
                assert rest[-3:] == events[-3:], "usage and [DONE]"


@pytest.mark.parametrize("forgets", [1, 3, 100])
async def test_a_position_beyond_the_log_is_computed_again_in_silence(
    client_of: ClientOf, forgets: int
) -> None:
    logs: Logs = {}
    whole = (
        await client_of(answering(logs)).post(COMPLETION[0], json={**COMPLETION[1], "stream": True})
    ).text
    events = whole.split("\n\n")
    client = client_of(answering(logs, forgets=forgets))
    for at, event in enumerate(events[:-2]):
        for request in resuming(client, (COMPLETION[0], {**COMPLETION[1], "stream": True}), last_id(event)):
            assert (await client.send(request)).text == "\n\n".join(events[at + 1 :])


async def test_what_broke_off_in_the_middle_goes_on_elsewhere(client_of: ClientOf) -> None:
    logs: Logs = {}
    script = [*steps(IDS, 3)[:2], Unavailable("the verifier was lost")]
    breaking = client_of(ScriptedRunner(MODEL, lambda request: script, logs))
    begun = (await breaking.post(COMPLETION[0], json={**COMPLETION[1], "stream": True})).text
    *has, error, _, _ = begun.split("\n\n")
    assert "the verifier was lost" in error and "unavailable_error" in error
    other = client_of(answering(logs))
    rest = (await other.get(f"/v1/sessions/{last_id(begun).replace(':', '/events?after=')}")).text
    undisturbed = await client_of(answering()).post(COMPLETION[0], json={**COMPLETION[1], "stream": True})
    assert text("\n\n".join([*has, rest])) == text(undisturbed.text) == TEXT


def text(stream: str) -> str:
    chunks = [event.partition("data: ")[2] for event in stream.split("\n\n") if '"choices"' in event]
    return "".join(httpx.Response(200, text=chunk).json()["choices"][0]["text"] for chunk in chunks)


@pytest.mark.parametrize(
    ("path", "status", "kind", "message"),
    [
        (f"/v1/sessions/{UNKNOWN}/events", 404, "not_found_error", "no session with this id is known"),
        (
            f"/v1/sessions/cmpl-{UNKNOWN}/events?after=3",
            404,
            "not_found_error",
            "no session with this id is known",
        ),
        ("/v1/sessions/7/events", 400, "invalid_request_error", "id must be that of an answer: 32 hex"),
        (
            "/v1/sessions/{id}/events?after=x",
            400,
            "invalid_request_error",
            "after must be a number of output",
        ),
        ("/v1/sessions/{id}/events?after=", 400, "invalid_request_error", "after must be a number of output"),
        (
            "/v1/sessions/{id}/events?after=-1",
            400,
            "invalid_request_error",
            "after must be a number of output",
        ),
        ("/v1/sessions/{id}/events?after=1,2", 400, "invalid_request_error", "must have 1 numbers"),
        ("/v1/sessions/{id}/events?after=42", 400, "invalid_request_error", "after must be at most 41 here"),
        ("/v1/sessions/{id}/events?after=41", 200, "", "[DONE]"),
    ],
)
async def test_refusals(client_of: ClientOf, path: str, status: int, kind: str, message: str) -> None:
    client = client_of(answering())
    id = (await client.post(COMPLETION[0], json=COMPLETION[1])).json()["id"]
    response = await client.get(path.replace("{id}", id))
    assert response.status_code == status and message in response.text
    if status != 200:
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"} and error["type"] == kind


async def test_refusals_of_a_header(client_of: ClientOf) -> None:
    client = client_of(answering())
    id = last_id((await client.post(COMPLETION[0], json={**COMPLETION[1], "stream": True})).text)
    body = {**COMPLETION[1], "stream": True}

    async def refused(method: str, path: str, header: str, body: object = None) -> str:
        response = await client.request(method, path, json=body, headers={"last-event-id": header})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "Last-Event-ID"
        return str(response.json()["error"]["message"])

    assert "a colon and the position" in await refused("POST", COMPLETION[0], "7", body)
    assert "only for stream = true" in await refused("POST", COMPLETION[0], id, COMPLETION[1])
    assert "is of a completion" in await refused("POST", CHAT[0], id, {**CHAT[1], "stream": True})
    assert "of the session in the path" in await refused("GET", f"/v1/sessions/{UNKNOWN}/events", id)
    unknown = await client.post(COMPLETION[0], json=body, headers={"last-event-id": f"{UNKNOWN}:3"})
    assert unknown.status_code == 404
    # An EventSource repeats its address, and has come further since.
    path = f"/v1/sessions/{id.partition(':')[0]}/events?after=0"
    assert (await client.get(path, headers={"last-event-id": id})).text == "data: [DONE]\n\n"


async def test_an_absent_store_is_said_with_when_to_come_back(client_of: ClientOf) -> None:
    runner = answering()
    client = client_of(runner)
    id = (await client.post(COMPLETION[0], json=COMPLETION[1])).json()["id"]
    assert (await client.get("/ready")).text == "ready\n"
    runner.store_is_away = True
    response = await client.get(f"/v1/sessions/{id}/events")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["type"] == "unavailable_error"
    assert (await client.get("/ready")).text == "ready, degraded: the store is away\n"
    runner.is_ready = False
    assert (await client.get("/ready")).status_code == 503


async def test_another_checkpoint_does_not_go_on(client_of: ClientOf) -> None:
    logs: Logs = {}
    id = (await client_of(answering(logs)).post(COMPLETION[0], json=COMPLETION[1])).json()["id"]
    retrained = ScriptedRunner(served(TOKENIZER), lambda request: steps(IDS), logs)
    for log in logs.values():
        object.__setattr__(log.recalled.request, "fingerprint", "older")
    response = await client_of(retrained).get(f"/v1/sessions/{id}/events")
    assert response.status_code == 503 and "another checkpoint of 'demo'" in response.text


async def test_only_the_first_prompts_session_has_the_answer(client_of: ClientOf) -> None:
    runner = answering()
    client = client_of(runner)
    id = (await client.post(COMPLETION[0], json={"prompt": ["a", "b"]})).json()["id"]
    first, second = runner.logs
    assert id == f"cmpl-{first.hex()}"
    assert (await client.get(f"/v1/sessions/{second.hex()}/events")).status_code == 404


async def test_who_comes_back_elsewhere_ends_the_stream_left_behind(serve: Serve) -> None:
    logs: Logs = {}
    runner = ScriptedRunner(MODEL, lambda request: [*steps(IDS[:3])[:-1], None, *steps(IDS)[3:]], logs)
    url, other = await serve(runner), await serve(answering(logs, 1))
    async with (
        httpx.AsyncClient(timeout=None) as client,
        client.stream("POST", url + COMPLETION[0], json={**COMPLETION[1], "stream": True}) as left_behind,
    ):
        pieces = left_behind.aiter_text()
        begun = await anext(pieces)
        await until(runner.waiting.is_set)
        rest = await client.get(f"{other}/v1/sessions/{last_id(begun).replace(':', '/events?after=')}")
        assert text(begun + rest.text).endswith("STOP there")
        runner.go_on.set()
        end = "".join([piece async for piece in pieces])
    assert '"type":"superseded_error"' in end and end.endswith("data: [DONE]\n\n")


async def test_a_session_is_its_keys_owners(metrics: Metrics) -> None:
    runner = answering()
    keys = [ApiKey(name, hashlib.sha256(name.encode()).digest()) for name in ("ann", "bob")]
    app = create_app(Intake(runner, lambda limit: 0), metrics)
    app.add_middleware(HttpAccess, access=Access(lambda: keys, metrics))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        ann, bob = ({"authorization": f"Bearer {name}"} for name in ("ann", "bob"))
        asked = {**COMPLETION[1], "prompt": ["a", "b"]}
        id = (await client.post(COMPLETION[0], json=asked, headers=ann)).json()["id"]
        assert (await client.get(f"/v1/sessions/{id}/events", headers=ann)).status_code == 200
        for one in (id, *(session.hex() for session in runner.logs), UNKNOWN):
            refused = await client.get(f"/v1/sessions/{one}/events", headers=bob)
            assert refused.status_code == 404 and "no session with this id is known" in refused.text
        assert (await client.get(f"/v1/sessions/{id}/events")).status_code == 401


async def test_silence_is_filled_and_errors_after_it_are_events(metrics: Metrics) -> None:
    errors: list[Any] = [Unavailable("none came in its place")]
    runner = ScriptedRunner(MODEL, lambda request: [None, *errors])
    app = create_app(Intake(runner, lambda limit: 0), metrics, keep_alive_seconds=0.01)
    sent: list[bytes] = []
    started: list[int] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            started.append(message["status"])
        else:
            sent.append(message["body"])

    received = iter(
        [{"type": "http.request", "body": b'{"prompt": "x", "stream": true}', "more_body": False}]
    )

    async def receive() -> Any:
        for message in received:
            return message
        return await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": COMPLETION[0], "headers": [], "query_string": b""}
    answering_it = asyncio.create_task(app(scope, receive, send))
    await until(lambda: len(sent) >= 3)
    assert started == [200] and set(sent) == {KEEP_ALIVE}
    runner.go_on.set()
    await answering_it
    error, done, end = [body for body in sent if body != KEEP_ALIVE]
    assert b"none came in its place" in error and done == b"data: [DONE]\n\n" and end == b""
    assert runner.open == 0


async def test_the_official_client_minds_neither_ids_nor_silence(
    serve: Callable[..., Any], metrics: Metrics
) -> None:
    script = [*steps(IDS[:3])[:-1], None, *steps(IDS)[3:]]
    runner = ScriptedRunner(MODEL, lambda request: script)
    url = await serve(runner, keep_alive_seconds=0.01)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    stream = await client.completions.create(model="demo", prompt="x", stream=True, max_tokens=40)
    told = ""
    async for chunk in stream:
        told += chunk.choices[0].text
        if not runner.go_on.is_set():
            await runner.waiting.wait()
            await asyncio.sleep(0.05)  # some silence
            runner.go_on.set()
    assert told == TEXT
