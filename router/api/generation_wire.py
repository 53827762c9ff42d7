"""Messages of outrider.v1.Generation to what the HTTP API has too, and back: the codec of the gRPC API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.errors import InvalidRequest
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import add_GenerationServicer_to_server as add_to_server
from router.api import schema
from router.api.generate import Chunk, Result
from router.api.validation import Body, Generation
from router.requests import SessionBegun

__all__ = ["CANCELLED", "SERVICE", "add_to_server", "body", "responses"]

SERVICE = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
CANCELLED = generation_pb2.CancelResponse()

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


def responses(
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


def body(request: generation_pb2.GenerateRequest) -> Body:
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
