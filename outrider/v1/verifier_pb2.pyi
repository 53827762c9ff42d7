from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class VerifierCommand(_message.Message):
    __slots__ = ("hello", "open", "speculation", "close", "cancel", "end_drafts", "give_back", "further")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    END_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    GIVE_BACK_FIELD_NUMBER: _ClassVar[int]
    FURTHER_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.Hello
    open: OpenSession
    speculation: SetSpeculation
    close: CloseSession
    cancel: CloseSession
    end_drafts: EndDrafts
    give_back: CloseSession
    further: _containers.RepeatedCompositeFieldContainer[VerifierCommand]
    def __init__(self, hello: _Optional[_Union[_common_pb2.Hello, _Mapping]] = ..., open: _Optional[_Union[OpenSession, _Mapping]] = ..., speculation: _Optional[_Union[SetSpeculation, _Mapping]] = ..., close: _Optional[_Union[CloseSession, _Mapping]] = ..., cancel: _Optional[_Union[CloseSession, _Mapping]] = ..., end_drafts: _Optional[_Union[EndDrafts, _Mapping]] = ..., give_back: _Optional[_Union[CloseSession, _Mapping]] = ..., further: _Optional[_Iterable[_Union[VerifierCommand, _Mapping]]] = ...) -> None: ...

class OpenSession(_message.Message):
    __slots__ = ("session_id", "params", "output", "num_speculative_tokens", "draft_key", "opening", "traceparent", "tracestate")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_KEY_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    params: _common_pb2.SessionParams
    output: _containers.RepeatedScalarFieldContainer[int]
    num_speculative_tokens: int
    draft_key: bytes
    opening: int
    traceparent: str
    tracestate: str
    def __init__(self, session_id: _Optional[bytes] = ..., params: _Optional[_Union[_common_pb2.SessionParams, _Mapping]] = ..., output: _Optional[_Iterable[int]] = ..., num_speculative_tokens: _Optional[int] = ..., draft_key: _Optional[bytes] = ..., opening: _Optional[int] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ...) -> None: ...

class EndDrafts(_message.Message):
    __slots__ = ("session_id", "opening", "seat", "turn")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    SEAT_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    opening: int
    seat: int
    turn: int
    def __init__(self, session_id: _Optional[bytes] = ..., opening: _Optional[int] = ..., seat: _Optional[int] = ..., turn: _Optional[int] = ...) -> None: ...

class SetSpeculation(_message.Message):
    __slots__ = ("session_id", "num_speculative_tokens", "opening")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    num_speculative_tokens: int
    opening: int
    def __init__(self, session_id: _Optional[bytes] = ..., num_speculative_tokens: _Optional[int] = ..., opening: _Optional[int] = ...) -> None: ...

class CloseSession(_message.Message):
    __slots__ = ("session_id", "opening")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    opening: int
    def __init__(self, session_id: _Optional[bytes] = ..., opening: _Optional[int] = ...) -> None: ...

class VerifierEvents(_message.Message):
    __slots__ = ("hello", "committed", "finished", "failed", "load", "cut_off", "dropped")
    class DroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    HELLO_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CUT_OFF_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.Hello
    committed: _containers.RepeatedCompositeFieldContainer[Committed]
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    failed: _containers.RepeatedCompositeFieldContainer[Failed]
    load: VerifierLoad
    cut_off: _containers.RepeatedCompositeFieldContainer[DrafterCutOff]
    dropped: _containers.ScalarMap[str, int]
    def __init__(self, hello: _Optional[_Union[_common_pb2.Hello, _Mapping]] = ..., committed: _Optional[_Iterable[_Union[Committed, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., failed: _Optional[_Iterable[_Union[Failed, _Mapping]]] = ..., load: _Optional[_Union[VerifierLoad, _Mapping]] = ..., cut_off: _Optional[_Iterable[_Union[DrafterCutOff, _Mapping]]] = ..., dropped: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("session_id", "base", "tokens", "accepted", "verified", "cached_prompt_tokens", "opening", "logprobs", "top_tokens", "top_logprobs", "guesses", "beside", "prompt_logprobs", "own", "drafters")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    BESIDE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    base: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    accepted: int
    verified: int
    cached_prompt_tokens: int
    opening: int
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_tokens: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    guesses: _containers.RepeatedCompositeFieldContainer[_common_pb2.Guess]
    beside: int
    prompt_logprobs: _common_pb2.PromptLogprobs
    own: _common_pb2.OwnCounts
    drafters: _containers.RepeatedCompositeFieldContainer[_common_pb2.DrafterCounts]
    def __init__(self, session_id: _Optional[bytes] = ..., base: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., accepted: _Optional[int] = ..., verified: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., opening: _Optional[int] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_tokens: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., guesses: _Optional[_Iterable[_Union[_common_pb2.Guess, _Mapping]]] = ..., beside: _Optional[int] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.PromptLogprobs, _Mapping]] = ..., own: _Optional[_Union[_common_pb2.OwnCounts, _Mapping]] = ..., drafters: _Optional[_Iterable[_Union[_common_pb2.DrafterCounts, _Mapping]]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("session_id", "reason", "opening")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    reason: FinishReason
    opening: int
    def __init__(self, session_id: _Optional[bytes] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., opening: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("session_id", "code", "message", "opening")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    code: int
    message: str
    opening: int
    def __init__(self, session_id: _Optional[bytes] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., opening: _Optional[int] = ...) -> None: ...

class DrafterCutOff(_message.Message):
    __slots__ = ("session_id", "turn", "reason", "opening")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    turn: int
    reason: str
    opening: int
    def __init__(self, session_id: _Optional[bytes] = ..., turn: _Optional[int] = ..., reason: _Optional[str] = ..., opening: _Optional[int] = ...) -> None: ...

class VerifierLoad(_message.Message):
    __slots__ = ("running", "waiting", "kv_usage", "step_seconds", "step_tokens", "price", "typical_step_seconds", "preemptions", "draining", "draft_starvation", "unread_prompt_tokens", "prompt_token_seconds", "goodput", "drafts_rest", "draft_gain", "draft_trials", "draft_cost")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRICE_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    DRAFT_STARVATION_FIELD_NUMBER: _ClassVar[int]
    UNREAD_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_REST_FIELD_NUMBER: _ClassVar[int]
    DRAFT_GAIN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TRIALS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_COST_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    kv_usage: float
    step_seconds: float
    step_tokens: int
    price: float
    typical_step_seconds: float
    preemptions: int
    draining: bool
    draft_starvation: float
    unread_prompt_tokens: int
    prompt_token_seconds: float
    goodput: float
    drafts_rest: bool
    draft_gain: float
    draft_trials: int
    draft_cost: float
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_usage: _Optional[float] = ..., step_seconds: _Optional[float] = ..., step_tokens: _Optional[int] = ..., price: _Optional[float] = ..., typical_step_seconds: _Optional[float] = ..., preemptions: _Optional[int] = ..., draining: _Optional[bool] = ..., draft_starvation: _Optional[float] = ..., unread_prompt_tokens: _Optional[int] = ..., prompt_token_seconds: _Optional[float] = ..., goodput: _Optional[float] = ..., drafts_rest: _Optional[bool] = ..., draft_gain: _Optional[float] = ..., draft_trials: _Optional[int] = ..., draft_cost: _Optional[float] = ...) -> None: ...

class DraftBatch(_message.Message):
    __slots__ = ("hello", "attach", "drafts", "stamp_us")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    STAMP_US_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.Hello
    attach: _containers.RepeatedCompositeFieldContainer[Attach]
    drafts: _containers.RepeatedCompositeFieldContainer[Draft]
    stamp_us: int
    def __init__(self, hello: _Optional[_Union[_common_pb2.Hello, _Mapping]] = ..., attach: _Optional[_Iterable[_Union[Attach, _Mapping]]] = ..., drafts: _Optional[_Iterable[_Union[Draft, _Mapping]]] = ..., stamp_us: _Optional[int] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("session_id", "draft_key")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DRAFT_KEY_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    draft_key: bytes
    def __init__(self, session_id: _Optional[bytes] = ..., draft_key: _Optional[bytes] = ...) -> None: ...

class Draft(_message.Message):
    __slots__ = ("session_id", "base", "tokens", "parents", "survival")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    SURVIVAL_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    base: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    survival: bytes
    def __init__(self, session_id: _Optional[bytes] = ..., base: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., survival: _Optional[bytes] = ...) -> None: ...

class CommitBatch(_message.Message):
    __slots__ = ("hello", "commits", "revoked", "echo_us", "held_us", "rest", "beside")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    ECHO_US_FIELD_NUMBER: _ClassVar[int]
    HELD_US_FIELD_NUMBER: _ClassVar[int]
    REST_FIELD_NUMBER: _ClassVar[int]
    BESIDE_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.Hello
    commits: _containers.RepeatedCompositeFieldContainer[Commit]
    revoked: _containers.RepeatedCompositeFieldContainer[Attach]
    echo_us: int
    held_us: int
    rest: bool
    beside: float
    def __init__(self, hello: _Optional[_Union[_common_pb2.Hello, _Mapping]] = ..., commits: _Optional[_Iterable[_Union[Commit, _Mapping]]] = ..., revoked: _Optional[_Iterable[_Union[Attach, _Mapping]]] = ..., echo_us: _Optional[int] = ..., held_us: _Optional[int] = ..., rest: _Optional[bool] = ..., beside: _Optional[float] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("session_id", "base", "tokens")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    base: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[bytes] = ..., base: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...
