"""outrider.v1.Generation: the abilities of the HTTP API over gRPC, by the same rules."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.errors import InvalidRequest, OutriderError, Overloaded
from outrider.net.rpc import errors_as_status, status
from outrider.v1 import generation_pb2, generation_pb2_grpc
from outrider.wire.session import new_session_id
from router.api import position, schema
from router.api.access import Access, guarded, owner
from router.api.body import MAX_BODY_BYTES, too_large
from router.api.deadline import TimeLimits, call_limits
from router.api.generate import Chunk, Result, generate
from router.api.grpc_health import HealthServicer
from router.api.record import Record, check_owner, named, recalled
from router.api.stream import internal_error
from router.api.validation import Body, DrawBelow, Generation, prepare
from router.metrics import Metrics
from router.requests import Events, SessionBegun, SessionRunner

logger = logging.getLogger(__name__)

SERVICE = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
HEALTH = "grpc.health.v1.Health"

_OPTIONAL = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "num_speculative_tokens",
)


Items = AsyncGenerator[SessionBegun | Chunk | Result, None]


class GenerationServicer(generation_pb2_grpc.GenerationServicer):
    """Converts and delegates. A cancelled call closes its session."""

    def __init__(
        self,
        runner: SessionRunner,
        metrics: Metrics,
        draw_below: DrawBelow,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` gives unix seconds."""
        self._runner = runner
        self._metrics = metrics
        self._draw_below = draw_below
        self._clock = clock

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        async with self._refusing(context):
            generation, events = await self._begun(request, call_limits(context))
            async with aclosing(self._items(generation, events)) as items:
                async for item in items:
                    for response in _responses(item, generation):
                        yield response

    async def Resume(
        self, request: generation_pb2.ResumeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        async with self._refusing(context):
            generation, events = await self._resumed(request)
            async with aclosing(self._items(generation, events, request.after)) as items:
                async for item in items:
                    for response in _responses(item, generation, request.after):
                        yield response

    async def Cancel(
        self, request: generation_pb2.CancelRequest, context: Any
    ) -> generation_pb2.CancelResponse:
        async with errors_as_status(context):
            session_id = position.parse_id(request.id)
            await check_owner(self._runner, session_id)
            self._runner.cancel(session_id)
        return generation_pb2.CancelResponse()

    @asynccontextmanager
    async def _refusing(self, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
        """An error ends the call with its status."""
        try:
            yield
            return
        except OutriderError as error:
            refusal = error
        except Exception:
            logger.exception("a call of Generation failed")
            refusal = internal_error()
        self._metrics.request_refused(refusal.kind)
        later = (("retry-after", str(refusal.retry_after)),) if isinstance(refusal, Overloaded) else ()
        await context.abort(status(refusal), refusal.message, later)

    async def _begun(
        self, request: generation_pb2.GenerateRequest, limits: TimeLimits
    ) -> tuple[Generation, Events]:
        if request.ByteSize() > MAX_BODY_BYTES:
            raise too_large(MAX_BODY_BYTES)
        body = _body(request)
        model = self._runner.model(body.model)
        self._runner.check_room()
        generation = await asyncio.to_thread(prepare, body, model, self._draw_below)
        generation = named(generation, new_session_id()).until(limits)
        shape = "chat" if isinstance(body, schema.ChatRequest) else "completion"
        record = Record(shape, int(self._clock()), 1, generation.stop, owner())
        return generation, self._runner.run(generation.sessions[0], record.to_bytes())

    async def _resumed(self, request: generation_pb2.ResumeRequest) -> tuple[Generation, Events]:
        session_id = position.parse_id(request.id)
        _, generation = await recalled(self._runner, session_id)
        if len(generation.sessions) > 1:
            raise InvalidRequest(
                f"this answer has {len(generation.sessions)} prompts: resume it over HTTP", field="id"
            )
        position.check((request.after,), generation.sessions)
        return generation, self._runner.resume(session_id)

    def _items(self, generation: Generation, events: Events, after: int | None = None) -> Items:
        return generate(events, generation, generation.sessions[0], self._metrics, after)


def _responses(
    item: SessionBegun | Chunk | Result, generation: Generation, after: int = 0
) -> Iterator[generation_pb2.GenerateResponse]:
    """What is told of an item to a client that has the first `after` tokens."""
    if isinstance(item, SessionBegun):
        (session,) = generation.sessions
        assert session.session_id is not None
        started = generation_pb2.Started(
            id=session.session_id.hex(),
            model=generation.model.name,
            seed=generation.seed,
            prompt_tokens=len(session.params.prompt),
        )
        yield generation_pb2.GenerateResponse(started=started)
    elif isinstance(item, Result):
        if item.text and item.position > after:
            yield _delta(item.text, ())
        yield generation_pb2.GenerateResponse(completed=_completed(item))
    else:
        yield _delta(item.text, item.token_ids)


def _body(request: generation_pb2.GenerateRequest) -> Body:
    """Returns the fields of a request over HTTP, so that the same rules hold. Raises InvalidRequest."""
    fields: dict[str, object] = {name: getattr(request, name) for name in _OPTIONAL if request.HasField(name)}
    fields |= {
        "model": request.model,
        "stop": list(request.stop),
        "logit_bias": dict(request.logit_bias),
        "ignore_eos": request.ignore_eos,
    }
    match request.WhichOneof("prompt"):
        case "text":
            return schema.parse(schema.CompletionRequest, fields | {"prompt": request.text})
        case "token_ids":
            return schema.parse(schema.CompletionRequest, fields | {"prompt": [list(request.token_ids.ids)]})
        case "chat":
            messages = [{"role": turn.role, "content": turn.content} for turn in request.chat.messages]
            return schema.parse(schema.ChatRequest, fields | {"messages": messages})
    raise InvalidRequest("prompt is required: one of text, token_ids, chat", field="prompt")


def _delta(text: str, token_ids: Sequence[int]) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(delta=generation_pb2.Delta(text=text, token_ids=token_ids))


def _completed(result: Result) -> generation_pb2.Completed:
    stats = result.speculation
    return generation_pb2.Completed(
        finish_reason=int(result.finish_reason),  # type: ignore[arg-type]
        usage=generation_pb2.Usage(
            prompt_tokens=result.usage.prompt_tokens,
            completion_tokens=result.usage.completion_tokens,
            cached_prompt_tokens=result.usage.cached_prompt_tokens,
        ),
        speculative_decoding=generation_pb2.SpeculativeDecoding(
            mean_acceptance_length=stats.mean_acceptance_length,
            draft_acceptance_rate=stats.draft_acceptance_rate,
            acceptance_histogram=stats.histogram,
            num_spec_steps=stats.steps,
            num_accepted_draft_tokens=stats.accepted,
            num_draft_tokens=stats.drafted,
        ),
    )


def add_generation_service(
    server: grpc.aio.Server,
    runner: SessionRunner,
    metrics: Metrics,
    *,
    draw_below: DrawBelow,
    access: Access | None = None,
) -> None:
    """Adds Generation, the standard health service and server reflection. Call it before the server
    starts."""
    generation = GenerationServicer(runner, metrics, draw_below)
    generation_pb2_grpc.add_GenerationServicer_to_server(guarded(generation, access), server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(runner.ready, [SERVICE]), server)
    reflection.enable_server_reflection([SERVICE, HEALTH, reflection.SERVICE_NAME], server)
