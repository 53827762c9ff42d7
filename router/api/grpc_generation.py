"""outrider.v1.Generation: the abilities of the HTTP API over gRPC, by the same rules."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import grpc

from outrider.errors import InvalidRequest, OutriderError, Overloaded, UnknownSession
from outrider.net.grpc_health import add_health
from outrider.net.rpc import errors_as_status, status
from outrider.telemetry.spans import Tracer
from router.api import generation_wire, position, schema
from router.api.access import Access, guarded, owner
from router.api.asked import asks_for
from router.api.deadline import TimeLimits, call_limits
from router.api.generate import generate_all
from router.api.intake import Intake
from router.api.output import Chunk, Result
from router.api.record import Record, recalled, sessions_of
from router.api.request_id import GrpcRequestIds
from router.api.stream import Items, internal_error
from router.api.threads import SMALL_BYTES, TINY_BYTES, Retelling, beside
from router.api.validation import Generation
from router.metrics import Metrics
from router.requests import Events, GenerationRequest, Resumption, SessionBegun

logger = logging.getLogger(__name__)


class GenerationServicer:
    """Delegates. A cancelled call closes its session."""

    def __init__(self, intake: Intake, metrics: Metrics, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives unix seconds."""
        self._intake = intake
        self._runner = intake.runner
        self._threads = intake.threads
        self._metrics = metrics
        self._clock = clock

    async def Generate(
        self, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[Any, None]:
        async with self._refusing(context):
            generation, answering = await self._begun(request, call_limits(context))
            async with aclosing(answering) as items:
                async for index, item in items:
                    if isinstance(item, Chunk) and not item.beside:
                        yield generation_wire.delta(index, item.text, item.token_ids)
                        continue
                    if isinstance(item, Result) and item.cut is not None:
                        raise item.cut  # gRPC has a status for it; the text is there
                    for response in await _told(index, item, generation):
                        yield response

    async def Resume(
        self, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[Any, None]:
        async with self._refusing(context):
            id, after = generation_wire.resumption(request)
            with self._threads.retelling(owner()) as place:
                generation, answering, after = await self._resumed(id, after, place)
                async with aclosing(answering) as items:
                    async for index, item in items:
                        for response in await _told(index, item, generation, after[index]):
                            yield response

    async def Cancel(self, request: Any, context: Any) -> Any:
        async with errors_as_status(context):
            session_id = position.parse_id(generation_wire.cancellation(request))
            with suppress(UnknownSession):  # what nobody knows, or another key's owner began, is no error
                for one in await sessions_of(self._runner, session_id, self._threads):
                    await self._runner.cancel(one)
        return generation_wire.CANCELLED

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

    async def _begun(self, request: Any, limits: TimeLimits) -> tuple[Generation, Items]:
        size = generation_wire.size(request)
        if size <= SMALL_BYTES:  # larger ones have few places where they are read
            await self._intake.line.turn(owner())
        if size <= TINY_BYTES:
            body = generation_wire.body(request)
        else:
            body = await self._threads.run(
                size, owner(), limits.first_token_by, generation_wire.body, request
            )
        generation = await self._intake.take(body, size, limits)
        shape = "chat" if isinstance(body, schema.ChatRequest) else "completion"
        asks_for(shape)
        strings = generation.stop.strings
        record = Record(
            shape,
            int(self._clock()),
            len(generation.sessions),
            strings,
            n=generation.n,
            calls=generation.calls,
            wording=generation.wording,
        )
        kept = record.to_bytes()

        def start(session: GenerationRequest) -> Events:
            return self._runner.run(session, kept if session is generation.sessions[0] else b"")

        return generation, generate_all(start, self._runner.together, generation, self._metrics)

    async def _resumed(
        self, id: str, after: position.Position, place: Retelling
    ) -> tuple[Generation, Items, position.Position]:
        """Returns the third with a number for each answer: a single 0 asks for all of all."""
        session_id = position.parse_id(id)
        record, generation = await recalled(self._runner, session_id, place)
        if record.prompts > record.n:
            raise InvalidRequest(
                f"this answer has {record.prompts // record.n} prompts: resume it over HTTP", field="id"
            )
        after = after if any(after) else (0,) * len(generation.told)
        position.check(after, generation.told)
        resumption = Resumption(session_id)

        def start(session: GenerationRequest) -> Events:
            assert session.session_id is not None
            return self._runner.resume(session.session_id, resumption)

        return (
            generation,
            generate_all(start, self._runner.together, generation, self._metrics, after, place),
            after,
        )


async def _told(
    index: int, item: SessionBegun | Chunk | Result, generation: Generation, after: int = 0
) -> Iterable[Any]:
    """Returns the messages that tell an item. What tells of a prompt may be long."""
    if isinstance(item, Chunk) and item.prompt is not None:
        return await beside(lambda: list(generation_wire.responses(index, item, generation, after)))
    return generation_wire.responses(index, item, generation, after)


def add_generation_service(
    server: grpc.aio.Server,
    intake: Intake,
    metrics: Metrics,
    access: Access | None = None,
    tracer: Tracer | None = None,
) -> None:
    """Adds Generation, the standard health service and server reflection. Call it before the server
    starts."""
    generation = GenerationServicer(intake, metrics)
    generation_wire.add_to_server(GrpcRequestIds(guarded(generation, access), tracer), server)
    add_health(server, intake.runner.ready, generation_wire.SERVICE)
