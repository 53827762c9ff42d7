"""Every error that Outrider raises on purpose, and its one mapping to gRPC status and HTTP code, as numbers.

A message is one sentence for the person who reads it: it names the field or flag, the limit and what to
change. It never holds an address of ours or a trace.
"""

from __future__ import annotations

from enum import IntEnum

MAX_MESSAGE = 500  # characters: it may quote what a client sent, and gRPC carries few KiB beside a status
MAX_FIELD = 200


class GrpcCode(IntEnum):
    """gRPC's status codes that our errors have."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


def printable(text: str, most: int) -> str:
    """Returns the text in one line of at most about so many characters, without its middle if it is longer.
    What would end the line, or change what a terminal shows, is told as Python writes it."""
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[-most // 2 :]}"
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


class OutriderError(Exception):
    """Base: an expected failure with a message that may be shown to a client."""

    grpc_code: GrpcCode = GrpcCode.INTERNAL
    http_status: int = 500
    kind: str = "internal_error"  # the `type` of an OpenAI error body
    code: str | None = None  # its `code`: a word that OpenAI's clients know

    def __init__(self, message: str, *, field: str | None = None) -> None:
        message = printable(message, MAX_MESSAGE)
        super().__init__(message)
        self.message = message
        # The request field at fault; `param` of an OpenAI error body.
        self.field = None if field is None else printable(field, MAX_FIELD)


def in_one_line(error: Exception) -> str:
    """Returns what an error says, as a phrase: its message if it is ours, else its type and its first
    line."""
    if isinstance(error, OutriderError):
        return error.message
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


class InvalidRequest(OutriderError):
    """The request cannot be served as it is."""

    grpc_code = GrpcCode.INVALID_ARGUMENT
    http_status = 400
    kind = "invalid_request_error"


class ContextExceeded(InvalidRequest):
    """The prompt, or the output that is asked for, does not fit into the model's context."""

    code = "context_length_exceeded"


class TooLarge(InvalidRequest):
    """The request's body is over the limit."""

    http_status = 413


class TooSlow(InvalidRequest):
    """The request's body did not come in time."""

    http_status = 408


class UnknownModel(OutriderError):
    """The request names a model that is not served here."""

    grpc_code = GrpcCode.NOT_FOUND
    http_status = 404
    kind = "not_found_error"
    code = "model_not_found"


class UnknownSession(OutriderError):
    """No log of that session: it never was, or has expired."""

    grpc_code = GrpcCode.NOT_FOUND
    http_status = 404
    kind = "not_found_error"


class Superseded(OutriderError):
    """The session goes on elsewhere: its client has come back by another connection or router."""

    grpc_code = GrpcCode.ABORTED
    http_status = 409
    kind = "superseded_error"


class Unavailable(OutriderError):
    """Nothing can serve the request at the moment (no verifier, or it was lost)."""

    grpc_code = GrpcCode.UNAVAILABLE
    http_status = 503
    kind = "unavailable_error"


class Cancelled(OutriderError):
    """Ended because the client asked for it."""

    grpc_code = GrpcCode.CANCELLED
    http_status = 499
    kind = "cancelled_error"


class Overloaded(OutriderError):
    """Refused to protect what is running; the client may come back."""

    grpc_code = GrpcCode.RESOURCE_EXHAUSTED
    http_status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, field: str | None = None, retry_after: int = 1) -> None:
        """`retry_after` is the number of whole seconds after which it is worth to come back."""
        super().__init__(message, field=field)
        self.retry_after = retry_after


class DeadlineExceeded(OutriderError):
    """The request was not finished in the time that its client gives it."""

    grpc_code = GrpcCode.DEADLINE_EXCEEDED
    http_status = 504
    kind = "timeout_error"


class NoneInTime(Unavailable, DeadlineExceeded):
    """Nothing that can serve the request came in that time."""


class Unauthenticated(OutriderError):
    """The client shows no key, or one that is not known here."""

    grpc_code = GrpcCode.UNAUTHENTICATED
    http_status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class PeerRefused(OutriderError):
    """A worker or router does not fit: protocol version, model, tokenizer."""

    grpc_code = GrpcCode.FAILED_PRECONDITION
    http_status = 503
    kind = "unavailable_error"


class IdInUse(OutriderError):
    """A worker's id belongs to another process at the moment."""

    grpc_code = GrpcCode.ALREADY_EXISTS
    http_status = 409
    kind = "conflict_error"


class Unhealthy(OutriderError):
    """A worker that is to be replaced: its model does not run."""


class PeerLost(OutriderError):
    """A process of a tensor-parallel group ended or hangs: the others cannot go on without it."""


class StepHung(OutriderError):
    """A step of a model does not end: its process can only be replaced."""


class StartupError(OutriderError):
    """A process cannot start: bad flag, missing or damaged checkpoint, port in use."""


class WrongOption(StartupError):
    """An option that cannot be as it is told. The message begins with its flag."""

    def __init__(self, option: str, sentence: str) -> None:
        super().__init__(f"--{option.replace('_', '-')} {sentence}")
        self.option = option
        self.sentence = sentence


class ModelRefused(StartupError):
    """The model cannot be run exactly by this engine; the message names what it lacks."""


BY_GRPC_CODE: dict[int, type[OutriderError]] = {
    cls.grpc_code: cls
    for cls in (
        InvalidRequest,
        UnknownModel,
        Superseded,
        Unavailable,
        Cancelled,
        Overloaded,
        DeadlineExceeded,
        PeerRefused,
    )
}


def unknown_session() -> UnknownSession:
    """Returns the refusal of an id that is nobody's or another's: nothing tells them apart."""
    return UnknownSession("no session with this id is known: it never was, or it was too long ago")


def superseded() -> Superseded:
    return Superseded("the session goes on elsewhere: its client has come back by another connection")


def from_grpc_code(code: int, message: str) -> OutriderError:
    """Returns the typed error for a status code that a peer reported; an unknown code stays internal."""
    return BY_GRPC_CODE.get(code, OutriderError)(message)
