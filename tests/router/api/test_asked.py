"""A request's id, and its line in the log, over HTTP and gRPC."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest

from outrider.telemetry.logs import figures_of
from outrider.v1 import generation_pb2, generation_pb2_grpc
from outrider.wire.trace_context import TraceContext
from router.api import asked
from router.api.access import Access, HttpAccess
from router.api.grpc_generation import add_generation_service
from router.api.http import create_app
from router.api.intake import Intake
from router.api.keys import ApiKey, digest
from router.api.request_id import RequestIds
from router.metrics import Metrics
from router.requests import GenerationRequest, SessionEvent
from tests.router.api.scripted import ScriptedRunner, byte_level, served, steps, until
from tests.telemetry.recorder import Recorder

TOKENIZER = byte_level()
IDS = TOKENIZER.encode("a secret answer", add_special_tokens=False).ids
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
KEYS = [ApiKey("alice", digest("k"))]
SHOWN = {"authorization": "Bearer k"}
ASKED = {"prompt": "a secret prompt", "max_tokens": 20}


def script(request: GenerationRequest) -> list[SessionEvent | Exception | None]:
    if request.params.max_tokens == 13:
        return [*steps(IDS, 4)[:1], ValueError("unforeseen: a secret")]
    return [*steps(IDS, 4)]


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner(served(TOKENIZER), script)


@pytest.fixture
async def client(runner: ScriptedRunner) -> AsyncIterator[httpx.AsyncClient]:
    metrics = Metrics()
    app = create_app(Intake(runner, lambda limit: 1), metrics)
    app.add_middleware(HttpAccess, access=Access(lambda: KEYS, metrics))
    app.add_middleware(RequestIds)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://router", headers=SHOWN) as client:
        yield client


@asynccontextmanager
async def grpc_stub(runner: ScriptedRunner) -> AsyncIterator[Any]:
    server, metrics = grpc.aio.server(), Metrics()
    add_generation_service(server, Intake(runner, lambda limit: 1), metrics, Access(lambda: KEYS, metrics))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield generation_pb2_grpc.GenerationStub(channel)
    await server.stop(None)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """Gives what the lines of requests at info and above tell, and what all lines say."""
    caplog.set_level(logging.INFO, logger=asked.__name__)

    def told() -> tuple[list[Mapping[str, Any]], str]:
        records = [one for one in caplog.records if one.name == asked.__name__]
        return [figures_of(one) for one in records], "".join(
            f"{one.getMessage()}{vars(one)}" for one in records
        )

    return told


async def test_the_line_of_a_request(client: httpx.AsyncClient, lines: Any) -> None:
    given = {"x-request-id": "mine", "traceparent": PARENT}
    answer = await client.post("/v1/completions", json=ASKED, headers=given)
    (line,), text = lines()
    usage, figures = answer.json()["usage"], answer.json()["metrics"]["speculative_decoding"]
    assert line.pop("seconds") >= line.pop("first_token_seconds") > 0
    assert line == {
        "request_id": "mine",
        "route": "POST /v1/completions",
        "status": 200,
        "key": "alice",
        "model": "demo",
        "prompt_tokens": usage["prompt_tokens"],
        "output_tokens": usage["completion_tokens"],
        "acceptance": round(figures["draft_acceptance_rate"], 4),
        "finish": "length",
        "trace_id": TRACE,
    }
    assert figures["draft_acceptance_rate"] > 0 and "secret" not in text


async def test_prompts_count_once_and_answers_each(client: httpx.AsyncClient, lines: Any) -> None:
    body = {**ASKED, "prompt": ["one", "another one"], "n": 3}
    answer = await client.post("/v1/completions", json=body)
    (line,), _ = lines()
    usage = answer.json()["usage"]
    assert (line["prompt_tokens"], line["output_tokens"]) == (usage["prompt_tokens"], 6 * len(IDS))
    assert line["finish"] == "length"


async def test_refusals_and_failures_have_lines_and_ids(client: httpx.AsyncClient, lines: Any) -> None:
    own = {"x-request-id": "mine"}
    answers = [
        await client.post("/v1/completions", json=ASKED, headers={**own, "authorization": "Bearer no"}),
        await client.post("/v1/completions", json={"prompt": 1.5}, headers=own),
        await client.post("/v1/completions", json={**ASKED, "max_tokens": 13}, headers=own),
        await client.get("/v1/models", headers=own),  # asks for no text: not at info
    ]
    assert [one.headers.get("x-request-id") for one in answers] == ["mine"] * 4
    told, text = lines()
    assert [line["status"] for line in told] == [one.status_code for one in answers[:3]] == [401, 400, 500]
    assert [line.get("key") for line in told] == [None, "alice", "alice"]
    assert told[2]["finish"] == "error" and "secret" not in text


async def test_a_stream_has_its_line_when_it_is_over(client: httpx.AsyncClient, lines: Any) -> None:
    async with client.stream("POST", "/v1/completions", json={**ASKED, "stream": True}) as answer:
        assert answer.headers["x-request-id"].startswith("req_")
        async for _ in answer.aiter_lines():
            pass
    (line,), _ = lines()
    assert (line["output_tokens"], line["request_id"]) == (len(IDS), answer.headers["x-request-id"])


async def test_calls_have_ids_and_lines_too(runner: ScriptedRunner, lines: Any) -> None:
    metadata = (*SHOWN.items(), ("x-request-id", "mine"), ("traceparent", PARENT))
    async with grpc_stub(runner) as stub:
        call = stub.Generate(
            generation_pb2.GenerateRequest(text="a secret", max_tokens=20), metadata=metadata
        )
        assert [pair for pair in await call.initial_metadata() if pair[0] == "x-request-id"] == [
            ("x-request-id", "mine")
        ]
        async for _ in call:
            pass
        refused = stub.Generate(
            generation_pb2.GenerateRequest(text="x", max_tokens=20), metadata=[("x-request-id", "two words")]
        )
        with pytest.raises(grpc.aio.AioRpcError) as unauthenticated:
            async for _ in refused:
                pass
        assert dict(unauthenticated.value.initial_metadata())["x-request-id"].startswith("req_")
        await stub.Cancel(generation_pb2.CancelRequest(id="00" * 16), metadata=metadata)
        failing = stub.Generate(generation_pb2.GenerateRequest(text="x", max_tokens=13), metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in failing:
                pass
        await until(lambda: len(lines()[0]) == 4)
    told, text = lines()
    assert [line["status"] for line in told] == ["OK", "UNAUTHENTICATED", "OK", "INTERNAL"]
    assert [line["route"].rpartition("/")[2] for line in told] == [
        "Generate",
        "Generate",
        "Cancel",
        "Generate",
    ]
    assert (told[0]["key"], told[0]["output_tokens"], told[0]["trace_id"]) == ("alice", len(IDS), TRACE)
    assert "secret" not in text


async def test_who_leaves_has_a_line_that_says_so(lines: Any) -> None:
    runner = ScriptedRunner(served(TOKENIZER), lambda request: [*steps(IDS, 4)[:1], None])  # None = it waits
    metadata = (("authorization", "Bearer k"),)
    async with grpc_stub(runner) as stub:
        call = stub.Generate(generation_pb2.GenerateRequest(text="x", max_tokens=20), metadata=metadata)
        await call.read()
        call.cancel()
        await until(lambda: bool(lines()[0]))
    (line,), _ = lines()
    assert (line["status"], line["finish"]) == ("CANCELLED", "abort")


async def test_nothing_is_written_where_nobody_wants_it(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger=asked.__name__)
    await client.post("/v1/completions", json=ASKED)
    assert not caplog.records


@pytest.mark.parametrize(
    ("parent", "state", "expected"),
    [
        (PARENT, "a=1,b=2", TraceContext(int(TRACE, 16), 0xF067AA0BA902B7, 1, "a=1,b=2")),
        (PARENT, "x" * 513, TraceContext(int(TRACE, 16), 0xF067AA0BA902B7, 1)),
        (PARENT.replace("00-4", "01-4") + "-more", None, TraceContext(int(TRACE, 16), 0xF067AA0BA902B7, 1)),
        (PARENT + "-more", "", None),
        (PARENT.replace("00-4", "ff-4"), "", None),
        (PARENT.replace(TRACE, "0" * 32), "", None),
        (PARENT.replace("00f067aa0ba902b7", "0" * 16), "", None),
        (PARENT.upper(), "", None),
        ("", "a=1", None),
        (None, None, None),
    ],
)
def test_a_trace_context_is_read(
    parent: str | None, state: str | None, expected: TraceContext | None
) -> None:
    read = TraceContext.read(parent, state)
    assert read == expected
    assert read is None or read.traceparent == PARENT


async def test_strangers_have_no_spans_and_nobody_makes_up_their_names(runner: ScriptedRunner) -> None:
    """Collectors count by name, and what waits to be sent to them is bounded."""
    metrics, recorder = Metrics(), Recorder()
    app = create_app(Intake(runner, lambda limit: 1), metrics)
    app.add_middleware(HttpAccess, access=Access(lambda: KEYS, metrics))
    app.add_middleware(RequestIds, tracer=recorder)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        for number in range(3):
            assert (await client.post(f"/v1/{number}", json=ASKED)).status_code == 401
            assert (await client.post(f"/v1/{number}", json=ASKED, headers=SHOWN)).status_code == 404
            there = await client.get(f"/v1/sessions/{number:032x}/events", headers=SHOWN)
            assert there.status_code == 404
        await client.post("/v1/completions", json=ASKED, headers=SHOWN)
    ended = [span for span in recorder.spans if span.ended]
    assert len(recorder.spans) == 10 and len(ended) == 7
    assert {span.name for span in ended} == {"POST", "GET", f"text_completion {served(TOKENIZER).name}"}
