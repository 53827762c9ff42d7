from outrider.v1 import common_pb2 as _common_pb2
from outrider.v1 import verifier_pb2 as _verifier_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionLog(_message.Message):
    __slots__ = ("request", "steps", "end")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    request: SessionRequest
    steps: _containers.RepeatedCompositeFieldContainer[SessionStep]
    end: SessionEnd
    def __init__(self, request: _Optional[_Union[SessionRequest, _Mapping]] = ..., steps: _Optional[_Iterable[_Union[SessionStep, _Mapping]]] = ..., end: _Optional[_Union[SessionEnd, _Mapping]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("model", "fingerprint", "num_speculative_tokens", "answer", "params", "owner", "protocol_version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    fingerprint: str
    num_speculative_tokens: int
    answer: bytes
    params: _common_pb2.SessionParams
    owner: str
    protocol_version: int
    def __init__(self, model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., num_speculative_tokens: _Optional[int] = ..., answer: _Optional[bytes] = ..., params: _Optional[_Union[_common_pb2.SessionParams, _Mapping]] = ..., owner: _Optional[str] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class SessionStep(_message.Message):
    __slots__ = ("tokens", "accepted", "verified", "cached_prompt_tokens", "numerics", "logprobs", "top_tokens", "top_logprobs", "guesses", "beside", "prompt_logprobs", "own", "drafters")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    BESIDE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    accepted: int
    verified: int
    cached_prompt_tokens: int
    numerics: str
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_tokens: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    guesses: _containers.RepeatedCompositeFieldContainer[_common_pb2.Guess]
    beside: int
    prompt_logprobs: _common_pb2.PromptLogprobs
    own: _common_pb2.OwnCounts
    drafters: _containers.RepeatedCompositeFieldContainer[_common_pb2.DrafterCounts]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., accepted: _Optional[int] = ..., verified: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., numerics: _Optional[str] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_tokens: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., guesses: _Optional[_Iterable[_Union[_common_pb2.Guess, _Mapping]]] = ..., beside: _Optional[int] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.PromptLogprobs, _Mapping]] = ..., own: _Optional[_Union[_common_pb2.OwnCounts, _Mapping]] = ..., drafters: _Optional[_Iterable[_Union[_common_pb2.DrafterCounts, _Mapping]]] = ...) -> None: ...

class SessionEnd(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: _verifier_pb2.FinishReason
    def __init__(self, reason: _Optional[_Union[_verifier_pb2.FinishReason, str]] = ...) -> None: ...
