"""Messages of outrider.v1.Generation to what the HTTP API has too, and back: the codec of the gRPC API.

Requests come as bytes, so that the key and the size are looked at before anything is made of them. Where
another server has read them already (Ray Serve's proxy), they come as messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from outrider.errors import InvalidRequest
from outrider.v1 import generation_pb2
from outrider.wire.guesses import DrafterCounts, drafters_to_wire, own_to_wire
from router.api import schema
from router.api.body import MAX_BODY_BYTES, MAX_VALUES, decoded, too_large
from router.api.logprobs import Scored, Told
from router.api.output import Chunk, Result
from router.api.position import Position
from router.api.prompt_logprobs import ScoredPrompt
from router.api.provenance import Guessed, Step
from router.api.structured import MAX_SCHEMA_BYTES
from router.api.template_fields import MAX_VARIABLES_BYTES
from router.api.text_fields import MAX_STOP_TOKENS
from router.api.validation import Body, Generation
from router.requests import SessionBegun
from router.tool_parser import CallDelta

SERVICE = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
CANCELLED = generation_pb2.CancelResponse()

MAX_FIELDS = 2**13  # of a request, and of a conversation: more than may be in them
MAX_TURN_FIELDS = 4 * MAX_FIELDS  # of all turns together
MOST_FIELDS = (MAX_FIELDS, MAX_FIELDS, MAX_TURN_FIELDS)
MAX_RESUME_BYTES = 1024  # of what only names a session
# Numbers of GenerateRequest's `chat` and Chat's `messages`; of `structured_outputs` and `choice`.
INNER: dict[int, Any] = {4: {1: {}}, 21: {3: {}}}

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
    "cache_salt",
    "n",
    "best_of",
    "parallel_tool_calls",
    "min_tokens",
    "priority",
    "prompt_logprobs",
    "skip_special_tokens",
)


def add_to_server(servicer: Any, server: grpc.aio.Server) -> None:
    """Lets a server answer Generation. The servicer's methods are given the bytes of requests."""
    told = generation_pb2.GenerateResponse.SerializeToString
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Generate": grpc.unary_stream_rpc_method_handler(servicer.Generate, None, told),
        "Resume": grpc.unary_stream_rpc_method_handler(servicer.Resume, None, told),
        "Cancel": grpc.unary_unary_rpc_method_handler(
            servicer.Cancel, None, generation_pb2.CancelResponse.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def size(request: bytes | Message) -> int:
    """Returns the request's bytes. Raises TooLarge."""
    found = len(request) if isinstance(request, bytes) else request.ByteSize()
    if found > MAX_BODY_BYTES:
        raise too_large(MAX_BODY_BYTES)
    return found


def resumption(request: bytes | generation_pb2.ResumeRequest) -> tuple[str, Position]:
    """Returns the id of the session and the client's position. Raises InvalidRequest."""
    asked = _message(generation_pb2.ResumeRequest, request)
    return asked.id, tuple(asked.each_after) or (asked.after,)


def cancellation(request: bytes | generation_pb2.CancelRequest) -> str:
    """Returns the id of the session. Raises InvalidRequest."""
    return _message(generation_pb2.CancelRequest, request).id


M = TypeVar("M", bound=Message)


def _message(kind: type[M], request: bytes | M, most_bytes: int = MAX_RESUME_BYTES) -> M:
    if not isinstance(request, bytes):
        return request
    if len(request) > most_bytes:
        raise too_large(most_bytes)
    try:
        return kind.FromString(request)
    except DecodeError:
        raise InvalidRequest("the bytes are no message of this method") from None


def _check_counts(raw: bytes) -> None:
    """Counts what is in a request before anything is made of it: two bytes may become a hundred in memory.
    Bytes that are no message are left to the decoder."""
    try:
        _count(raw, 0, len(raw), 0, [0] * len(MOST_FIELDS), INNER)
    except IndexError:
        raise InvalidRequest("the bytes are no message of this method") from None


def _count(raw: bytes, start: int, end: int, depth: int, counts: list[int], inner: Mapping[int, Any]) -> None:
    """Adds the fields between two places to `counts`, by depth, those of `inner` messages too. Raises
    InvalidRequest if they are too many, and IndexError at the end of the bytes."""
    while start < end:
        counts[depth] += 1
        if counts[depth] > MOST_FIELDS[depth]:
            raise InvalidRequest(
                f"the request has more than {MOST_FIELDS[depth]} parts: send several requests"
            )
        tag, start = _varint(raw, start)
        match tag & 7:
            case 0:
                _, start = _varint(raw, start)
            case 1:
                start += 8
            case 2:
                length, start = _varint(raw, start)
                if (deeper := inner.get(tag >> 3)) is not None:
                    _count(raw, start, min(start + length, end), depth + 1, counts, deeper)
                start += length
            case 5:
                start += 4
            case _:  # a group: none of ours
                raise InvalidRequest("the bytes are no message of this method")


def _varint(raw: bytes, start: int) -> tuple[int, int]:
    """Returns the number at `start`, and where what follows it begins. Raises IndexError at the end."""
    value = shift = 0
    while True:
        byte = raw[start]
        start += 1
        value |= (byte & 127) << shift
        if byte < 128 or shift >= 63:
            return value, start
        shift += 7


def responses(
    index: int, item: SessionBegun | Chunk | Result, generation: Generation, after: int = 0
) -> Iterator[generation_pb2.GenerateResponse]:
    """What is told of an item of the answer at `index` to a client that has its first `after` tokens."""
    if isinstance(item, SessionBegun):
        session = generation.sessions[0]
        assert session.session_id is not None
        started = generation_pb2.Started(
            id=session.session_id.hex(),
            model=generation.model.name,
            seed=generation.seed,
            prompt_tokens=len(session.params.prompt),
        )
        yield generation_pb2.GenerateResponse(started=started)
    elif isinstance(item, Result):
        if (item.text or item.calls or item.reasoning) and item.position > after:
            yield delta(index, item.text, (), calls=item.calls, reasoning=item.reasoning)
        yield generation_pb2.GenerateResponse(completed=_completed(index, item))
    else:
        yield delta(
            index,
            item.text,
            item.token_ids,
            item.scored,
            item.step,
            item.calls,
            item.prompt,
            item.reasoning,
        )


def body(asked: bytes | generation_pb2.GenerateRequest) -> Body:
    """Returns the fields of a request over HTTP, so that the same rules hold. Raises InvalidRequest."""
    if isinstance(asked, bytes):
        _check_counts(asked)
    request = _message(generation_pb2.GenerateRequest, asked, MAX_BODY_BYTES)
    fields: dict[str, object] = {name: getattr(request, name) for name in _OPTIONAL if request.HasField(name)}
    fields |= {
        "model": request.model,
        "stop": list(request.stop),
        "logit_bias": dict(request.logit_bias),
        "ignore_eos": request.ignore_eos,
        "return_speculation": request.return_speculation,
        "stop_token_ids": _items("stop_token_ids", request.stop_token_ids, MAX_STOP_TOKENS),
        "include_stop_str_in_output": request.include_stop_str_in_output,
    }
    if request.prediction:
        fields["prediction"] = {"type": "content", "content": request.prediction}
    count = request.logprobs if request.HasField("logprobs") else None
    if request.HasField("structured_outputs"):
        fields["structured_outputs"] = _structured(request.structured_outputs)
    if request.tools:
        fields["tools"] = [_tool(index, tool) for index, tool in enumerate(request.tools)]
    if request.HasField("tool_choice"):
        fields["tool_choice"] = _tool_choice(request.tool_choice)
    match request.WhichOneof("prompt"):
        case "text":
            fields |= {"prompt": request.text, "logprobs": count, **_of_prompt(request)}
            return schema.parse(schema.CompletionRequest, fields)
        case "token_ids":
            ids = _items("prompt", request.token_ids.ids, MAX_VALUES)
            fields |= {"prompt": [ids], "logprobs": count, **_of_prompt(request)}
            return schema.parse(schema.CompletionRequest, fields)
        case "chat":
            fields |= {"messages": [_turn(turn) for turn in request.chat.messages]}
            fields |= {"logprobs": count is not None, "top_logprobs": count}
            fields |= _template_fields(request.chat)
            for name in ("echo", "suffix"):
                if getattr(request, name):
                    raise InvalidRequest(f"{name} is for a prompt, not for a chat", field=name)
            return schema.parse(schema.ChatRequest, fields)
    raise InvalidRequest("prompt is required: one of text, token_ids, chat", field="prompt")


def _turn(turn: generation_pb2.ChatMessage) -> dict[str, object]:
    """Returns the turn as HTTP has it."""
    calls = [
        {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        for call in turn.tool_calls
    ]
    told: dict[str, object] = {"role": turn.role, "content": turn.content, "tool_calls": calls or None}
    told["reasoning"] = turn.reasoning or None
    return told | ({"tool_call_id": turn.tool_call_id} if turn.HasField("tool_call_id") else {})


def _tool(index: int, tool: generation_pb2.Tool) -> dict[str, object]:
    """Returns the tool as HTTP has it."""
    function: dict[str, object] = {"name": tool.name, "strict": tool.strict}
    if tool.HasField("description"):
        function["description"] = tool.description
    if tool.HasField("parameters"):
        try:
            function["parameters"] = decoded(tool.parameters.encode())
        except InvalidRequest:
            raise InvalidRequest(f"tools[{index}].parameters is no JSON", field="tools") from None
    return {"type": "function", "function": function}


def _tool_choice(choice: generation_pb2.ToolChoice) -> object:
    """Returns the field as HTTP has it."""
    kind = choice.WhichOneof("choice")
    if kind == "name":
        return {"type": "function", "function": {"name": choice.name}}
    return kind


def _of_prompt(request: generation_pb2.GenerateRequest) -> dict[str, object]:
    return {"echo": request.echo, "suffix": request.suffix}


def _template_fields(chat: generation_pb2.Chat) -> dict[str, object]:
    """Returns the fields as HTTP has them."""
    fields: dict[str, object] = {"continue_final_message": chat.continue_final_message}
    if chat.HasField("add_generation_prompt"):
        fields["add_generation_prompt"] = chat.add_generation_prompt
    if chat.HasField("reasoning_effort"):
        fields["reasoning_effort"] = chat.reasoning_effort
    if chat.chat_template_kwargs:
        try:
            text = chat.chat_template_kwargs[: MAX_VARIABLES_BYTES + 1]
            fields["chat_template_kwargs"] = decoded(text.encode())
        except InvalidRequest:
            raise InvalidRequest(
                f"chat_template_kwargs must be a JSON object of at most {MAX_VARIABLES_BYTES} bytes",
                field="chat_template_kwargs",
            ) from None
    return fields


def _structured(asked: generation_pb2.StructuredOutputs) -> dict[str, object]:
    """Returns the field as HTTP has it."""
    kind = asked.WhichOneof("constraint")
    if kind is None:
        return {}
    if kind == "choice":
        return {kind: _items("structured_outputs", asked.choice.texts, MAX_SCHEMA_BYTES)}
    return {kind: getattr(asked, kind)}


def _items(name: str, values: Sequence[Any], most: int) -> list[Any]:
    """Returns a field's values, of which a list holds the interpreter while it is made. Raises InvalidRequest
    if they are too many."""
    if len(values) > most:
        raise InvalidRequest(f"{name} has {len(values)} items, and may have {most}", field=name)
    return list(values)


def delta(
    index: int,
    text: str,
    token_ids: Sequence[int],
    scored: Sequence[Scored] = (),
    step: Step | None = None,
    calls: Sequence[CallDelta] = (),
    prompt: ScoredPrompt | None = None,
    reasoning: str = "",
) -> generation_pb2.GenerateResponse:
    response = generation_pb2.GenerateResponse()
    into = response.delta
    into.text = text
    into.token_ids.extend(token_ids)
    # What most have nothing of costs nothing in them.
    if index:
        into.index = index
    if reasoning:
        into.reasoning = reasoning
    if scored:
        into.logprobs.extend(_logprob(one.own, one.top) for one in scored)
    if step is not None:
        into.step.CopyFrom(_step(step))
    for call in calls:
        into.tool_calls.add(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
    for own, top, rank in () if prompt is None else map(prompt.at, range(1, len(prompt.ids))):
        told = into.prompt_logprobs.add()
        told.CopyFrom(_logprob(own, top))
        told.rank = rank
    return response


def _step(step: Step) -> generation_pb2.Step:
    return generation_pb2.Step(
        index=step.index,
        seconds=step.seconds,
        drafted=step.drafted,
        accepted=step.accepted,
        tokens=[
            generation_pb2.TokenOrigin(source=int(source), token=_guessed(token))  # type: ignore[arg-type]
            for source, token in step.tokens
        ],
        rejected=None if step.rejected is None else _guessed(step.rejected),
    )


def _guessed(told: Guessed) -> generation_pb2.GuessedToken:
    token = generation_pb2.GuessedToken(token_id=told.token_id, piece=told.piece)
    if told.guess is not None:
        token.drafter, token.probability = told.guess.drafter, told.guess.chance
    return token


def _logprob(own: Told, top: Sequence[Told] = ()) -> generation_pb2.TokenLogprob:
    return generation_pb2.TokenLogprob(
        token_id=own.token_id, logprob=own.logprob, piece=own.piece, top=[_logprob(one) for one in top]
    )


def _completed(index: int, result: Result) -> generation_pb2.Completed:
    stats = result.speculation
    return generation_pb2.Completed(
        index=index,
        finish_reason=int(result.finish_reason),  # type: ignore[arg-type]
        usage=generation_pb2.Usage(
            prompt_tokens=result.usage.prompt_tokens,
            completion_tokens=result.usage.completion_tokens,
            cached_prompt_tokens=result.usage.cached_prompt_tokens,
            reasoning_tokens=result.usage.reasoning_tokens,
            accepted_prediction_tokens=stats.own.predicted_accepted,
            rejected_prediction_tokens=stats.own.predicted - stats.own.predicted_accepted,
        ),
        speculative_decoding=generation_pb2.SpeculativeDecoding(
            mean_acceptance_length=stats.mean_acceptance_length,
            draft_acceptance_rate=stats.draft_acceptance_rate,
            acceptance_histogram=stats.histogram,
            num_spec_steps=stats.steps,
            num_accepted_draft_tokens=stats.accepted,
            num_draft_tokens=stats.drafted,
            own=own_to_wire(stats.own),
            drafters=drafters_to_wire(
                DrafterCounts(0, drafted, accepted, 0, name)
                for name, (drafted, accepted) in stats.drafters.items()
            ),
        ),
        numerics_changes=result.numerics_changes,
        tool_calls=len(result.called),
        untold_tokens=sum(one.usage.completion_tokens for one in result.untold),
    )
