"""The records of a session's log (proto/outrider/v1/session.proto): to bytes, and back to plain data."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from outrider.errors import InvalidRequest, UnknownSession
from outrider.v1 import session_pb2
from outrider.wire.codec import finish_reason_from_wire, params_from_wire, params_to_wire
from outrider.wire.guesses import (
    NO_OWN,
    DrafterCounts,
    Guesses,
    OwnCounts,
    drafters_from_wire,
    drafters_to_wire,
    guesses_from_wire,
    guesses_to_wire,
    own_from_wire,
    own_to_wire,
)
from outrider.wire.hello import PROTOCOL_VERSION
from outrider.wire.logprobs import (
    Logprobs,
    PromptLogprobs,
    from_numbers,
    prompt_from_wire,
    prompt_to_wire,
)
from outrider.wire.logprobs import numbers as logprob_numbers
from outrider.wire.session import FinishReason, SessionParams


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """What was asked for; `proto/outrider/v1/session.proto` explains the fields."""

    model: str
    fingerprint: str
    params: SessionParams
    num_speculative_tokens: int | None
    answer: bytes
    owner: str


UNLOGGED_RECORD = session_pb2.SessionLog(end=session_pb2.SessionEnd()).SerializeToString()
"""A log that is an end alone: the store did not take the session's request."""

LoggedStep = tuple[
    tuple[int, ...],
    int,
    int,
    int,
    str,
    Logprobs,
    Guesses,
    PromptLogprobs | None,
    int,
    OwnCounts,
    tuple[DrafterCounts, ...],
]
"""(tokens, accepted, verified, cached prompt tokens, numerics, log-probabilities, guesses, the
log-probabilities of the prompt, draft tokens verified on other branches, the verifier's own guesses, those of
several drafters) of one step."""


@dataclass(frozen=True, slots=True)
class SessionLog:
    """A whole log."""

    request: LoggedRequest
    steps: Sequence[LoggedStep]
    end: FinishReason | None


def request_record(request: LoggedRequest) -> bytes:
    message = session_pb2.SessionRequest(
        model=request.model,
        fingerprint=request.fingerprint,
        params=params_to_wire(request.params),
        num_speculative_tokens=request.num_speculative_tokens,
        answer=request.answer,
        owner=request.owner,
        protocol_version=PROTOCOL_VERSION,
    )
    return session_pb2.SessionLog(request=message).SerializeToString()


def step_record(
    tokens: Sequence[int],
    accepted: int,
    verified: int,
    cached_prompt_tokens: int,
    numerics: str = "",
    logprobs: Logprobs = (),
    guesses: Guesses = (),
    prompt: PromptLogprobs | None = None,
    beside: int = 0,
    own: OwnCounts = NO_OWN,
    drafters: tuple[DrafterCounts, ...] = (),
) -> bytes:
    """`numerics`: of the verifier, if the step before was another's."""
    message = session_pb2.SessionLog()
    step = message.steps.add(tokens=tokens, accepted=accepted, verified=verified)
    # What most steps have nothing of costs nothing in them.
    if cached_prompt_tokens:
        step.cached_prompt_tokens = cached_prompt_tokens
    if numerics:
        step.numerics = numerics
    if beside:
        step.beside = beside
    if (counts := own_to_wire(own)) is not None:
        step.own.CopyFrom(counts)
    if logprobs:
        of_tokens, top_tokens, top = logprob_numbers(logprobs)
        step.logprobs.extend(of_tokens)
        step.top_tokens.extend(top_tokens)
        step.top_logprobs.extend(top)
    if guesses:
        step.guesses.extend(guesses_to_wire(guesses))
    if prompt is not None:
        step.prompt_logprobs.SetInParent()  # it may be empty
        step.prompt_logprobs.CopyFrom(prompt_to_wire(prompt))
    if drafters:
        step.drafters.extend(drafters_to_wire(drafters))
    return message.SerializeToString()


def end_record(end: FinishReason) -> bytes:
    return session_pb2.SessionLog(end=session_pb2.SessionEnd(reason=int(end))).SerializeToString()  # type: ignore[arg-type]


def is_end(record: bytes) -> bool:
    """Returns whether the record ends a session's log."""
    with suppress(DecodeError):
        return session_pb2.SessionLog.FromString(record).HasField("end")
    return False


def log_from_bytes(raw: bytes) -> SessionLog:
    """Returns the log that the records are, one after the other, from the first on.

    Raises InvalidRequest if they are no log, or one of another protocol version, and UnknownSession if they
    are UNLOGGED_RECORD."""
    if raw == UNLOGGED_RECORD:
        raise UnknownSession(
            "the store did not take this session's log, so that it cannot be resumed: send the request "
            "again, with the same seed for the same text"
        )
    try:
        message = session_pb2.SessionLog.FromString(raw)
    except DecodeError:
        raise InvalidRequest("the bytes are no session's log") from None
    request = message.request
    if not message.HasField("request"):
        raise InvalidRequest("the session's log does not begin with a request")
    if request.protocol_version != PROTOCOL_VERSION:
        raise InvalidRequest(
            f"the session's log is of protocol version {request.protocol_version}, this side reads "
            f"{PROTOCOL_VERSION}: send the request again"
        )
    if not request.params.prompt:
        raise InvalidRequest("the session's log has no prompt")
    return SessionLog(
        _request(request),
        [
            (
                tuple(step.tokens),
                step.accepted,
                step.verified,
                step.cached_prompt_tokens,
                step.numerics,
                from_numbers(step.logprobs, step.top_tokens, step.top_logprobs),
                guesses_from_wire(step.guesses),
                prompt_from_wire(step.prompt_logprobs) if step.HasField("prompt_logprobs") else None,
                step.beside,
                own_from_wire(step.own) if step.HasField("own") else NO_OWN,
                drafters_from_wire(step.drafters) if step.drafters else (),
            )
            for step in message.steps
        ],
        finish_reason_from_wire(message.end.reason) if message.HasField("end") else None,
    )


def _request(message: session_pb2.SessionRequest) -> LoggedRequest:
    chosen = message.HasField("num_speculative_tokens")
    return LoggedRequest(
        model=message.model,
        fingerprint=message.fingerprint,
        params=params_from_wire(message.params),
        num_speculative_tokens=message.num_speculative_tokens if chosen else None,
        answer=message.answer,
        owner=message.owner,
    )
