"""Keys before both APIs: who comes in, how often, and whose a session is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from outrider.errors import Overloaded, Unauthenticated, unknown_session
from outrider.net.rpc import bind, new_server
from outrider.v1 import generation_pb2, generation_pb2_grpc
from router.api.access import Access, HttpAccess, owner
from router.api.grpc_generation import add_generation_service
from router.api.http import create_app
from router.api.intake import Intake
from router.api.keys import ApiKey, Keys, digest, keys_of
from router.metrics import Metrics
from tests.router.api.scripted import ScriptedRunner, byte_level, served, steps, until

TOKENIZER = byte_level()
MODEL = served(TOKENIZER)
IDS = TOKENIZER.encode("the fox there", add_special_tokens=False).ids
ALICE, BOB, CAROL = (ApiKey(name, digest(f"key of {name}")) for name in ("alice", "bob", "carol"))
REQUEST = {"prompt": "the fox"}

Stub = generation_pb2_grpc.GenerationStub


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer key of {name}"}


def metadata(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer key of {name}"),)


def answering() -> ScriptedRunner:
    return ScriptedRunner(MODEL, lambda request: steps(IDS, 4))


def waiting() -> ScriptedRunner:
    """Begins, and never ends."""
    return ScriptedRunner(MODEL, lambda request: [*steps(IDS, 4)[:1], None])


class Served:
    """Both APIs over one runner, behind the same keys."""

    def __init__(
        self, runner: ScriptedRunner, keys: Keys, metrics: Metrics, clock: Any, share_prefixes: bool = False
    ) -> None:
        self.runner = runner
        self.access = Access(keys, metrics, clock)
        intake = Intake(runner, lambda limit: 1, share_prefixes=share_prefixes)
        app = create_app(intake, metrics)
        app.add_middleware(HttpAccess, access=self.access)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router")
        self.server = new_server()
        add_generation_service(self.server, intake, metrics, self.access)
        self.channel = grpc.aio.insecure_channel(bind(self.server, "127.0.0.1", 0))

    async def post(self, name: str | None, **changes: Any) -> httpx.Response:
        headers = {} if name is None else bearer(name)
        return await self.http.post("/v1/completions", json={**REQUEST, **changes}, headers=headers)

    async def close(self) -> None:
        await self.http.aclose()
        await self.channel.close()
        await self.server.stop(None)


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture
async def serve(metrics: Metrics) -> AsyncIterator[Serve]:
    started = []

    async def start(
        runner: ScriptedRunner, *keys: ApiKey, source: Keys | None = None, clock: Any = lambda: 0.0
    ) -> Served:
        service = Served(runner, source or (lambda: keys), metrics, clock)
        await service.server.start()
        started.append(service)
        return service

    yield start
    for service in started:
        await service.close()


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", "key of alice", "Basic key of alice", "Bearer é"],
)
async def test_without_a_key_nobody_comes_in(serve: Serve, header: str | None) -> None:
    runner = answering()
    service = await serve(runner, ALICE)
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/sessions/00/events", "/other"):
        method = "POST" if "completions" in path else "GET"
        refused = await service.http.request(method, path, json=REQUEST, headers=headers)
        assert refused.status_code == 401
        assert refused.headers["WWW-Authenticate"] == "Bearer"
        error = refused.json()["error"]
        assert error == {
            "message": error["message"],
            "type": "authentication_error",
            "param": None,
            "code": "invalid_api_key",
        }
    assert runner.requests == []


async def test_probes_and_scrapers_need_no_key(serve: Serve) -> None:
    service = await serve(answering(), ALICE)
    for path in ("/health", "/ready", "/metrics"):
        assert (await service.http.get(path)).status_code == 200


async def test_with_a_key_all_is_as_without(serve: Serve, metrics: Metrics) -> None:
    service = await serve(answering(), ALICE, BOB)
    answers = [await service.post(name) for name in ("alice", "bob", "alice")]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert {answer.json()["choices"][0]["text"] for answer in answers} == {"the fox there"}
    assert (await service.http.get("/v1/models", headers=bearer("bob"))).status_code == 200
    assert (await service.http.get("/v1/none", headers=bearer("bob"))).status_code == 404
    exposed = metrics.exposition().decode()
    assert 'outrider_key_requests_total{key="alice"} 2.0' in exposed
    assert 'outrider_key_requests_total{key="bob"} 1.0' in exposed
    assert 'outrider_key_requests_running{key="alice"} 0.0' in exposed
    assert "key of" not in exposed


async def test_grpc_asks_for_the_same_keys(serve: Serve) -> None:
    runner = answering()
    service = await serve(runner, ALICE)
    request = generation_pb2.GenerateRequest(text="the fox")
    stub = Stub(service.channel)
    for shown in ((), (("authorization", "Bearer wrong"),), (("authorization", "key of alice"),)):
        for call in (
            stub.Generate(request, metadata=shown),
            stub.Resume(generation_pb2.ResumeRequest(id="00" * 16), metadata=shown),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in call:
                    pass
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Cancel(generation_pb2.CancelRequest(id="00" * 16), metadata=shown)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert runner.requests == [] and runner.cancelled == []
    said = [response async for response in stub.Generate(request, metadata=metadata("alice"))]
    assert "".join(response.delta.text for response in said) == "the fox there"


async def test_a_key_has_so_many_requests_at_a_time(serve: Serve, metrics: Metrics) -> None:
    runner = waiting()
    limited = ApiKey("alice", ALICE.digest, max_concurrent=2)
    service = await serve(runner, limited, BOB)
    over_http = asyncio.create_task(service.post("alice"))
    over_grpc = Stub(service.channel).Generate(
        generation_pb2.GenerateRequest(text="the fox"), metadata=metadata("alice")
    )
    await over_grpc.read()
    await over_grpc.read()
    await until(lambda: runner.open == 2)
    refused = await service.post("alice")
    assert refused.status_code == 429
    assert refused.headers["Retry-After"] == "1"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async for _ in Stub(service.channel).Generate(
            generation_pb2.GenerateRequest(text="the fox"), metadata=metadata("alice")
        ):
            pass
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ("retry-after", "1") in tuple(error.value.trailing_metadata() or ())
    assert (await service.http.get("/v1/models", headers=bearer("alice"))).status_code == 200
    resumed = await service.http.get(f"/v1/sessions/{'00' * 16}/events?after=0", headers=bearer("alice"))
    assert resumed.status_code == 429  # a stream is a stream, from wherever it is read
    other = asyncio.create_task(service.post("bob"))
    await until(lambda: runner.open == 3)
    exposed = metrics.exposition().decode()
    assert 'outrider_key_requests_running{key="alice"} 2.0' in exposed
    assert 'outrider_key_requests_refused_total{key="alice",limit="max-concurrent"} 3.0' in exposed
    over_grpc.cancel()  # a place is free when one has gone
    await until(lambda: runner.open == 2)
    again = asyncio.create_task(service.post("alice"))
    await until(lambda: runner.open == 3)
    for task in (over_http, other, again):
        task.cancel()
    await asyncio.gather(over_http, other, again, return_exceptions=True)


async def test_a_request_counts_as_many_times_as_it_has_prompts(serve: Serve, metrics: Metrics) -> None:
    runner = waiting()
    service = await serve(runner, ApiKey("alice", ALICE.digest, max_concurrent=3))
    asking = asyncio.create_task(service.post("alice", prompt=["the", "fox"]))
    await until(lambda: runner.open == 2)
    assert (await service.post("alice", prompt=["the", "fox"])).status_code == 429
    never = await service.post("alice", prompt=["a"] * 4)
    assert never.status_code == 400 and "4 answers" in never.json()["error"]["message"]
    assert runner.open == 2
    last = asyncio.create_task(service.post("alice"))
    await until(lambda: runner.open == 3)
    assert 'outrider_key_requests_running{key="alice"} 3.0' in metrics.exposition().decode()
    for task in (asking, last):
        task.cancel()
    await asyncio.gather(asking, last, return_exceptions=True)
    assert 'outrider_key_requests_running{key="alice"} 0.0' in metrics.exposition().decode()


async def test_a_minutes_requests_are_counted_by_prompts(serve: Serve) -> None:
    service = await serve(answering(), ApiKey("alice", ALICE.digest, requests_per_minute=3))
    answers = [await service.post("alice", prompt=prompt) for prompt in (["a", "b"], ["a", "b"], "a")]
    # The second took one of the two that it needed.
    assert [answer.status_code for answer in answers] == [200, 429, 429]


async def test_the_key_is_looked_at_before_the_message(serve: Serve) -> None:
    service = await serve(answering(), ALICE)
    generate = service.channel.unary_stream("/outrider.v1.Generation/Generate")
    for name, code in (("bob", grpc.StatusCode.UNAUTHENTICATED), ("alice", grpc.StatusCode.INVALID_ARGUMENT)):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in generate(b"\xff" * 1000, metadata=metadata(name)):
                pass
        assert refused.value.code() is code


def test_a_minutes_requests_may_come_at_once_and_then_evenly() -> None:
    now = 100.0
    key = ApiKey("alice", b"", requests_per_minute=3)
    access = Access(lambda: (key,), Metrics(), lambda: now)

    def ask() -> int | None:
        """None = admitted; otherwise the seconds to wait."""
        try:
            with access.admitted(key):
                return None
        except Overloaded as refused:
            return refused.retry_after

    assert [ask() for _ in range(5)] == [None, None, None, 20, 20]
    now += 19.5
    assert ask() == 1
    now += 0.5
    assert [ask(), ask()] == [None, 20]
    now += 600
    assert [ask() for _ in range(4)] == [None, None, None, 20]


async def test_over_the_rate_the_answer_says_when_to_come_back(serve: Serve) -> None:
    service = await serve(answering(), ApiKey("alice", ALICE.digest, requests_per_minute=1), BOB)
    assert (await service.post("alice")).status_code == 200
    refused = await service.post("alice")
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "60")
    assert (await service.post("bob")).status_code == 200


async def test_a_cancel_counts_as_a_request_but_not_as_one_in_progress(serve: Serve) -> None:
    limits: dict[str, Any] = {"requests_per_minute": 2, "max_concurrent": 1}
    service = await serve(waiting(), ApiKey("alice", ALICE.digest, **limits))
    stub: Any = Stub(service.channel)
    call = stub.Generate(generation_pb2.GenerateRequest(text="the fox"), metadata=metadata("alice"))
    started = (await anext(aiter(call))).started
    cancel = generation_pb2.CancelRequest(id=started.id)
    await stub.Cancel(cancel, metadata=metadata("alice"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Cancel(cancel, metadata=metadata("alice"))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    call.cancel()


async def test_keys_come_and_go_without_a_restart(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(ALICE.line)
    service = await serve(answering(), source=keys_of(file, None))
    assert [(await service.post(name)).status_code for name in ("alice", "bob")] == [200, 401]
    file.write_text(f"{BOB.line} max-concurrent=4\n")
    assert [(await service.post(name)).status_code for name in ("alice", "bob")] == [401, 200]


async def test_a_session_is_its_owners_alone(serve: Serve) -> None:
    runner = answering()
    service = await serve(runner, ALICE, BOB)
    streamed = await service.post("alice", stream=True)
    (first, *_) = [line[4:] for line in streamed.text.splitlines() if line.startswith("id: ")]
    session = first.partition(":")[0]
    events = f"/v1/sessions/{session}/events?after=0"
    assert (await service.http.get(events, headers=bearer("alice"))).status_code == 200
    for foreign in (
        await service.http.get(events, headers=bearer("bob")),
        await service.http.post(
            "/v1/completions",
            json={**REQUEST, "stream": True},
            headers={**bearer("bob"), "Last-Event-ID": first},
        ),
    ):
        assert foreign.status_code == 404, foreign.text
        assert foreign.json()["error"]["message"] == unknown_session().message  # as if it never was
    stub = Stub(service.channel)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in stub.Resume(generation_pb2.ResumeRequest(id=session), metadata=metadata("bob")):
            pass
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    for foreign_id in (session, "ab" * 16):  # nobody finds out which sessions there are
        await stub.Cancel(generation_pb2.CancelRequest(id=foreign_id), metadata=metadata("bob"))
    assert runner.cancelled == []
    await stub.Cancel(generation_pb2.CancelRequest(id=session), metadata=metadata("alice"))
    assert [id.hex() for id in runner.cancelled] == [session]


async def test_requests_side_by_side_have_their_own_owners(metrics: Metrics) -> None:
    access = Access(lambda: (ALICE, BOB, CAROL), metrics)
    found: dict[str, str] = {}

    async def handle(name: str) -> None:
        access.identify(f"Bearer key of {name}")
        await asyncio.sleep(0)
        found[name] = owner()

    await asyncio.gather(*(handle(name) for name in ("alice", "bob", "carol")))
    assert found == {name: name for name in ("alice", "bob", "carol")}
    assert owner() == ""
    with pytest.raises(Unauthenticated):
        access.identify(json.dumps("alice"))
