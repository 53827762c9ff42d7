"""outrider.v1.Generation: the abilities of the HTTP API over gRPC, by the same rules."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.errors import InvalidRequest, OutriderError
from outrider.rpc import errors_as_status
from outrider.v1 import generation_pb2, generation_pb2_grpc, verifier_pb2
from outrider.wire.codec import SessionId, new_session_id, session_id_from_wire
from router.api import schema
from router.api.body import MAX_BODY_BYTES, too_large
from router.api.generate import Result, generate
from router.api.grpc_health import HealthServicer
from router.api.stream import internal_error
from router.api.validation import Body, DrawBelow, prepare
from router.metrics import Metrics
from router.requests import FinishReason, SessionRunner

logger = logging.getLogger(__name__)

SERVICE = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
HEALTH = "grpc.health.v1.Health"

_REASONS = {
    FinishReason.STOP: verifier_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: verifier_pb2.FINISH_REASON_LENGTH,
}
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


class GenerationServicer(generation_pb2_grpc.GenerationServicer):
    """Converts and delegates. A cancelled call closes its session."""

    def __init__(self, runner: SessionRunner, metrics: Metrics, draw_below: DrawBelow) -> None:
        self._runner = runner
        self._metrics = metrics
        self._draw_below = draw_below

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        try:
            async with aclosing(self._responses(request)) as responses:
                async for response in responses:
                    yield response
            return
        except OutriderError as error:
            refusal = error
        except Exception:
            logger.exception("a call of Generate failed")
            refusal = internal_error()
        self._metrics.request_refused(refusal.kind)
        await context.abort(refusal.grpc_code, refusal.message)

    async def Cancel(
        self, request: generation_pb2.CancelRequest, context: Any
    ) -> generation_pb2.CancelResponse:
        async with errors_as_status(context):
            self._runner.cancel(_session_id(request.id))
        return generation_pb2.CancelResponse()

    async def _responses(
        self, request: generation_pb2.GenerateRequest
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        if request.ByteSize() > MAX_BODY_BYTES:
            raise too_large(MAX_BODY_BYTES)
        body = _body(request)
        model = self._runner.model(body.model)
        generation = await asyncio.to_thread(prepare, body, model, self._draw_below)
        session_id = new_session_id()
        session = replace(generation.sessions[0], session_id=session_id)
        started = generation_pb2.Started(
            id=session_id.hex(), model=model.name, seed=generation.seed, prompt_tokens=len(session.prompt)
        )
        yield generation_pb2.GenerateResponse(started=started)
        async with aclosing(generate(self._runner, generation, session, self._metrics)) as items:
            async for item in items:
                if isinstance(item, Result):
                    yield generation_pb2.GenerateResponse(completed=_completed(item))
                else:
                    delta = generation_pb2.Delta(text=item.text, token_ids=item.token_ids)
                    yield generation_pb2.GenerateResponse(delta=delta)


def _session_id(text: str) -> SessionId:
    try:
        return session_id_from_wire(bytes.fromhex(text))
    except (ValueError, InvalidRequest):
        raise InvalidRequest("id must be the one that Started told", field="id") from None


def _body(request: generation_pb2.GenerateRequest) -> Body:
    """The same fields as over HTTP, so that the same rules hold. Raises InvalidRequest."""
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


def _completed(result: Result) -> generation_pb2.Completed:
    stats = result.speculation
    return generation_pb2.Completed(
        finish_reason=_REASONS[result.finish_reason],
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
    server: grpc.aio.Server, runner: SessionRunner, metrics: Metrics, *, draw_below: DrawBelow
) -> None:
    """Adds Generation, the standard health service and server reflection. Before the server is started."""
    generation_pb2_grpc.add_GenerationServicer_to_server(
        GenerationServicer(runner, metrics, draw_below), server
    )
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(runner.ready, [SERVICE]), server)
    reflection.enable_server_reflection([SERVICE, HEALTH, reflection.SERVICE_NAME], server)
