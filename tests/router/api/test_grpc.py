from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.errors import Overloaded
from outrider.v1 import generation_pb2, generation_pb2_grpc, verifier_pb2
from router.api.grpc_generation import add_generation_service
from router.api.intake import Intake
from router.api.threads import Threads
from router.metrics import Metrics
from router.requests import GenerationRequest, SessionEvent, SessionRunner
from tests.router.api.scripted import ScriptedRunner, byte_level, served, steps, until

TOKENIZER = byte_level()
MODEL = served(TOKENIZER)
TEXT = "naïve 😀 fox STOP there"
IDS = TOKENIZER.encode(TEXT, add_special_tokens=False).ids
DRAWN = 4711

Connect = Callable[..., Awaitable[grpc.aio.Channel]]
Request = generation_pb2.GenerateRequest


@pytest.fixture
async def connect(metrics: Metrics) -> AsyncIterator[Connect]:
    started = []

    async def start(runner: SessionRunner, threads: Threads | None = None) -> grpc.aio.Channel:
        server = grpc.aio.server()
        add_generation_service(
            server, Intake(runner, lambda limit: DRAWN, threads=threads or Threads()), metrics
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        started.append((server, channel))
        return channel

    yield start
    for server, channel in started:
        await channel.close()
        await server.stop(None)


def answering() -> ScriptedRunner:
    return ScriptedRunner(MODEL, lambda request: steps(IDS, 4))


async def responses(channel: grpc.aio.Channel, request: Request) -> list[generation_pb2.GenerateResponse]:
    return [response async for response in generation_pb2_grpc.GenerationStub(channel).Generate(request)]


async def test_a_text(connect: Connect) -> None:
    request = Request(text="the fox", stop=["STOP"], temperature=0.0, max_tokens=30, num_speculative_tokens=0)
    runner = answering()
    first, *deltas, last = await responses(await connect(runner), request)
    (session,) = runner.requests
    assert (
        session.params.sampling.greedy
        and session.num_speculative_tokens == 0
        and session.params.max_tokens == 30
    )
    prompt = len(TOKENIZER.encode("the fox").ids)
    assert (first.started.model, first.started.seed, first.started.prompt_tokens) == ("demo", DRAWN, prompt)
    assert "".join(response.delta.text for response in deltas) == "naïve 😀 fox "
    tokens = [id for response in deltas for id in response.delta.token_ids]
    assert tokens == IDS[: len(tokens)]
    completed = last.completed
    assert completed.finish_reason == verifier_pb2.FINISH_REASON_STOP
    assert completed.usage.completion_tokens == len(tokens)
    assert completed.usage.cached_prompt_tokens == 3
    stats = completed.speculative_decoding
    assert sum(stats.acceptance_histogram) == stats.num_spec_steps > 0
    assert stats.mean_acceptance_length == 1 + stats.num_accepted_draft_tokens / stats.num_spec_steps


async def test_too_many_biases_are_refused(connect: Connect) -> None:
    request = Request(text="x", logit_bias=dict.fromkeys(range(1025), 1.0))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await responses(await connect(answering()), request)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == "logit_bias must have at most 1024 token ids, not 1025"


async def test_ids_and_chat_and_every_parameter(connect: Connect) -> None:
    runner = answering()
    channel = await connect(runner)
    request = Request(token_ids=generation_pb2.TokenIds(ids=[5, 6]), model="demo", seed=2**64 - 1, top_k=-1)
    request.logit_bias[3] = 1.5
    request.ignore_eos = True
    await responses(channel, request)
    chat = generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="user", content="hi")])
    *_, last = await responses(channel, Request(chat=chat))
    ids, conversation = runner.requests
    asked = ids.params
    assert (asked.prompt, asked.stop_token_ids) == ((5, 6), ())
    assert (asked.sampling.seed, asked.sampling.top_k) == (2**64 - 1, 0)
    assert ids.params.sampling.logit_bias == {3: 1.5} and ids.num_speculative_tokens is None
    assert (
        TOKENIZER.decode(list(conversation.params.prompt), skip_special_tokens=False)
        == "<s>user: hi\nassistant:"
    )
    assert conversation.params.max_tokens == MODEL.max_context - len(conversation.params.prompt)
    assert last.completed.finish_reason == verifier_pb2.FINISH_REASON_LENGTH


BAD = {
    "no prompt": (Request(), "prompt is required"),
    "empty text": (Request(text=""), "prompt is empty"),
    "many ids": (
        Request(text="a", stop_token_ids=[1] * 1025),
        "stop_token_ids has 1025 items, and may have 1024",
    ),
    "many choices": (
        Request(
            text="a",
            structured_outputs=generation_pb2.StructuredOutputs(
                choice=generation_pb2.Choice(texts=[""] * 40_000)
            ),
        ),
        "the request has more than 32768 parts",
    ),
    "empty ids": (Request(token_ids=generation_pb2.TokenIds()), "prompt is empty"),
    "bad id": (
        Request(token_ids=generation_pb2.TokenIds(ids=[99999])),
        "token id 99999 at index 0; ids go from",
    ),
    "too long": (Request(token_ids=generation_pb2.TokenIds(ids=[5] * 64)), "takes at most 63"),
    "empty chat": (Request(chat=generation_pb2.Chat()), "messages must not be empty"),
    "role": (
        Request(chat=generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="x", content="y")])),
        "messages[0].role must be one of system, developer, user, assistant, tool, not 'x'",
    ),
    "max_tokens": (Request(text="x", max_tokens=0), "max_tokens must be from 1 to"),
    "temperature": (Request(text="x", temperature=-1), "temperature must be in [0, 100]"),
    "NaN": (Request(text="x", temperature=math.nan), "temperature must be a finite number"),
    "top_p": (Request(text="x", top_p=0), "top_p must be in (0, 1]"),
    "stops": (Request(text="x", stop=["y"] * 17), "stop must be at most 16 strings, not 17"),
    "k": (
        Request(text="x", num_speculative_tokens=5000),
        "num_speculative_tokens must be from 0 (off) to 1024",
    ),
}


@pytest.mark.parametrize(("request_", "message"), BAD.values(), ids=BAD.keys())
async def test_bad_input_is_refused_by_the_same_rules(
    connect: Connect, request_: Request, message: str
) -> None:
    channel = await connect(answering())
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await responses(channel, request_)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in (refused.value.details() or "")
    assert await responses(channel, Request(text="x"))


@pytest.mark.parametrize(
    ("error", "code", "details"),
    [
        (Overloaded("too many"), grpc.StatusCode.RESOURCE_EXHAUSTED, "too many"),
        (ZeroDivisionError("secret"), grpc.StatusCode.INTERNAL, "the server failed to answer this request"),
    ],
)
async def test_errors_keep_their_code_and_what_came_before_them(
    connect: Connect, error: Exception, code: grpc.StatusCode, details: str
) -> None:
    runner = ScriptedRunner(MODEL, lambda request: [*steps(IDS)[:3], error])
    seen = []
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        async for response in generation_pb2_grpc.GenerationStub(await connect(runner)).Generate(
            Request(text="x")
        ):
            seen.append(response)
    assert failed.value.code() is code
    assert details in (failed.value.details() or "") and "secret" not in (failed.value.details() or "")
    assert len(seen) == 4 and runner.open == 0


async def test_an_unknown_model(connect: Connect) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="'other'") as refused:
        await responses(await connect(answering()), Request(text="x", model="other"))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_the_id_is_told_once_the_session_has_begun_and_before_any_token(connect: Connect) -> None:
    runner = ScriptedRunner(MODEL, lambda request: [None, *steps(IDS)])
    runner.logged.clear()
    call = generation_pb2_grpc.GenerationStub(await connect(runner)).Generate(Request(text="x"))
    first = asyncio.create_task(call.read())
    await until(lambda: runner.open == 1)
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not first.done()
    runner.logged.set()
    assert (await first).started.id
    await runner.waiting.wait()
    runner.go_on.set()
    assert (await call.read()).delta.token_ids


@pytest.mark.parametrize("tokens", [0, 3])
async def test_a_cancelled_call_closes_its_session(connect: Connect, tokens: int) -> None:
    runner = ScriptedRunner(MODEL, lambda request: [*steps(IDS)[:tokens], None])
    call = generation_pb2_grpc.GenerationStub(await connect(runner)).Generate(Request(text="x"))
    await call.read()
    await until(lambda: runner.waiting.is_set() and runner.open == 1)
    call.cancel()
    await until(lambda: runner.open == 0)


async def test_health_follows_the_workers(connect: Connect) -> None:
    runner = answering()
    stub = health_pb2_grpc.HealthStub(await connect(runner))
    states = health_pb2.HealthCheckResponse
    name = "outrider.v1.Generation"
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=name))
    assert (await watch.read()).status == states.SERVING
    runner.is_ready = False
    assert (await watch.read()).status == states.NOT_SERVING
    for service in ("", name):
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status == states.NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    other = stub.Watch(health_pb2.HealthCheckRequest(service="nobody"))
    assert (await other.read()).status == states.SERVICE_UNKNOWN


async def test_reflection_lists_the_services_and_describes_generate(connect: Connect) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(await connect(answering()))
    asked = reflection_pb2.ServerReflectionRequest
    call = stub.ServerReflectionInfo(
        iter([asked(list_services=""), asked(file_containing_symbol="outrider.v1.Generation")])
    )
    listed, described = [response async for response in call]
    names = {service.name for service in listed.list_services_response.service}
    assert {"outrider.v1.Generation", "grpc.health.v1.Health"} <= names
    assert any(
        b"GenerateRequest" in file for file in described.file_descriptor_response.file_descriptor_proto
    )


async def test_cancel_names_the_session_that_started_told(connect: Connect) -> None:
    runner = ScriptedRunner(MODEL, lambda request: [*steps(IDS[:2])[:-1], None])
    channel = await connect(runner)
    stub = generation_pb2_grpc.GenerationStub(channel)
    started = (await anext(aiter(stub.Generate(Request(text="the fox"))))).started
    await runner.waiting.wait()
    await stub.Cancel(generation_pb2.CancelRequest(id=started.id))
    (session,) = runner.requests
    assert runner.cancelled == [session.session_id] == [bytes.fromhex(started.id)]
    await stub.Cancel(generation_pb2.CancelRequest(id="ab" * 16))  # that nobody knows, which is no error


async def test_cancel_ends_all_answers_of_a_request_though_the_first_is_over(connect: Connect) -> None:
    def script(request: GenerationRequest) -> list[SessionEvent | None]:
        over = request is runner.requests[0]
        return steps(IDS[:2]) if over else [*steps(IDS[:2])[:-1], None]

    runner = ScriptedRunner(MODEL, script)
    stub = generation_pb2_grpc.GenerationStub(await connect(runner))
    call = stub.Generate(Request(text="the fox", n=3))
    started = (await anext(aiter(call))).started
    await runner.waiting.wait()
    await stub.Cancel(generation_pb2.CancelRequest(id=started.id))
    assert runner.cancelled == [one.session_id for one in runner.requests] and len(runner.cancelled) == 3
    runner.store_is_away = True
    await stub.Cancel(generation_pb2.CancelRequest(id=started.id))
    assert runner.cancelled[3:] == [bytes.fromhex(started.id)]


@pytest.mark.parametrize("id", ["", "cmpl-7", "00" * 15, "00" * 17])
async def test_cancel_of_something_that_is_no_id_is_refused(connect: Connect, id: str) -> None:
    runner = answering()
    stub = generation_pb2_grpc.GenerationStub(await connect(runner))
    with pytest.raises(
        grpc.aio.AioRpcError, match="id must be that of an answer: 32 hexadecimal digits"
    ) as refusal:
        await stub.Cancel(generation_pb2.CancelRequest(id=id))
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert runner.cancelled == []
