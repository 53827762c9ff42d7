"""The records of a session's log (proto/outrider/v1/session.proto): to bytes, and back to plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from google.protobuf.message import DecodeError

from outrider.errors import InvalidRequest
from outrider.sampling.params import SamplingParams
from outrider.v1 import session_pb2, verifier_pb2
from outrider.wire.codec import sampling_from_wire, sampling_to_wire


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """What was asked for; `proto/outrider/v1/session.proto` explains the fields."""

    model: str
    fingerprint: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    num_speculative_tokens: int | None
    answer: bytes


class LoggedEnd(IntEnum):
    """How a session ended; a log without an end can be gone on with."""

    CANCELLED = verifier_pb2.FINISH_REASON_UNSPECIFIED
    STOP = verifier_pb2.FINISH_REASON_STOP
    LENGTH = verifier_pb2.FINISH_REASON_LENGTH


LoggedStep = tuple[tuple[int, ...], int, int, int]
"""(tokens, accepted, verified, cached prompt tokens) of one step."""


@dataclass(frozen=True, slots=True)
class SessionLog:
    """A whole log."""

    request: LoggedRequest
    steps: Sequence[LoggedStep]
    end: LoggedEnd | None


def request_record(request: LoggedRequest) -> bytes:
    message = session_pb2.SessionRequest(
        model=request.model,
        fingerprint=request.fingerprint,
        prompt=request.prompt,
        sampling=sampling_to_wire(request.sampling),
        max_tokens=request.max_tokens,
        ignore_eos=request.ignore_eos,
        stop_token_ids=request.stop_token_ids,
        num_speculative_tokens=request.num_speculative_tokens,
        answer=request.answer,
    )
    return session_pb2.SessionLog(request=message).SerializeToString()


def step_record(tokens: Sequence[int], accepted: int, verified: int, cached_prompt_tokens: int) -> bytes:
    step = session_pb2.SessionStep(
        tokens=tokens, accepted=accepted, verified=verified, cached_prompt_tokens=cached_prompt_tokens
    )
    return session_pb2.SessionLog(steps=(step,)).SerializeToString()


def end_record(end: LoggedEnd) -> bytes:
    return session_pb2.SessionLog(end=session_pb2.SessionEnd(reason=int(end))).SerializeToString()  # type: ignore[arg-type]


def log_from_bytes(raw: bytes) -> SessionLog:
    """Of records one after the other, from the first on. Raises InvalidRequest where they are no log."""
    try:
        message = session_pb2.SessionLog.FromString(raw)
    except DecodeError:
        raise InvalidRequest("the bytes are no session's log") from None
    if not message.request.prompt:
        raise InvalidRequest("the session's log does not begin with a request")
    return SessionLog(
        _request(message.request),
        [
            (tuple(step.tokens), step.accepted, step.verified, step.cached_prompt_tokens)
            for step in message.steps
        ],
        LoggedEnd(message.end.reason) if message.HasField("end") else None,
    )


def _request(message: session_pb2.SessionRequest) -> LoggedRequest:
    chosen = message.HasField("num_speculative_tokens")
    return LoggedRequest(
        model=message.model,
        fingerprint=message.fingerprint,
        prompt=tuple(message.prompt),
        sampling=sampling_from_wire(message.sampling),
        max_tokens=message.max_tokens,
        ignore_eos=message.ignore_eos,
        stop_token_ids=tuple(message.stop_token_ids),
        num_speculative_tokens=message.num_speculative_tokens if chosen else None,
        answer=message.answer,
    )
