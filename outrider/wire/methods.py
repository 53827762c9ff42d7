"""The methods that roles serve one another, each with the codecs of what is asked and answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from outrider.v1 import common_pb2
from outrider.wire import drafter_sessions, registry, speculation, verifier_sessions
from outrider.wire.codec import (
    SMALL_BYTES,
    Codec,
    tokenizer_from_wire,
    tokenizer_to_wire,
    worker_info_from_wire,
    worker_info_to_wire,
)
from outrider.wire.hello import Role

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")


@dataclass(frozen=True, slots=True)
class Method(Generic[Asked, Answered]):
    """A method of a gRPC service: one question and one answer, or a stream of both."""

    service: str
    name: str
    asked: Codec[Asked, Any]
    answered: Codec[Answered, Any]
    streams: bool = False

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"


MAX_TOKENIZER_BYTES = 64 * 2**20  # a tokenizer.json has few MiB, rarely tens

VERIFIER = "outrider.v1.Verifier"
DRAFTER = "outrider.v1.Drafter"
REGISTRY = "outrider.v1.Registry"

_INFO_ASKED: Codec[None, Any] = Codec(
    common_pb2.GetInfoRequest, lambda _: common_pb2.GetInfoRequest(), lambda _: None, SMALL_BYTES
)
_INFO = Codec(common_pb2.WorkerInfo, worker_info_to_wire, worker_info_from_wire, registry.MAX_RECORD_BYTES)
_TOKENIZER_ASKED: Codec[None, Any] = Codec(
    common_pb2.GetTokenizerRequest, lambda _: common_pb2.GetTokenizerRequest(), lambda _: None, SMALL_BYTES
)
_TOKENIZER = Codec(common_pb2.Tokenizer, tokenizer_to_wire, tokenizer_from_wire, MAX_TOKENIZER_BYTES)

VERIFIER_SESSIONS = Method(
    VERIFIER, "Sessions", verifier_sessions.COMMANDS, verifier_sessions.EVENTS, streams=True
)
SPECULATE = Method(VERIFIER, "Speculate", speculation.DRAFTS, speculation.COMMITS, streams=True)
DRAFTER_SESSIONS = Method(
    DRAFTER, "Sessions", drafter_sessions.COMMANDS, drafter_sessions.EVENTS, streams=True
)
GET_INFO = {
    role: Method(service, "GetInfo", _INFO_ASKED, _INFO)
    for role, service in ((Role.VERIFIER, VERIFIER), (Role.DRAFTER, DRAFTER))
}
GET_TOKENIZER = {
    role: Method(service, "GetTokenizer", _TOKENIZER_ASKED, _TOKENIZER)
    for role, service in ((Role.VERIFIER, VERIFIER), (Role.DRAFTER, DRAFTER))
}
BEAT = Method(REGISTRY, "Beat", registry.BEATS, registry.ANSWERS)
LEAVE = Method(REGISTRY, "Leave", registry.LEAVES, registry.LEFT)
JOIN = Method(REGISTRY, "Join", drafter_sessions.EVENTS, drafter_sessions.COMMANDS, streams=True)
