from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftEndCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFT_END_CAUSE_UNSPECIFIED: _ClassVar[DraftEndCause]
    DRAFT_END_CAUSE_UNFIT: _ClassVar[DraftEndCause]
    DRAFT_END_CAUSE_UNREACHED: _ClassVar[DraftEndCause]
    DRAFT_END_CAUSE_CUT_OFF: _ClassVar[DraftEndCause]
    DRAFT_END_CAUSE_REVOKED: _ClassVar[DraftEndCause]
    DRAFT_END_CAUSE_FAILED: _ClassVar[DraftEndCause]
DRAFT_END_CAUSE_UNSPECIFIED: DraftEndCause
DRAFT_END_CAUSE_UNFIT: DraftEndCause
DRAFT_END_CAUSE_UNREACHED: DraftEndCause
DRAFT_END_CAUSE_CUT_OFF: DraftEndCause
DRAFT_END_CAUSE_REVOKED: DraftEndCause
DRAFT_END_CAUSE_FAILED: DraftEndCause

class DrafterCommand(_message.Message):
    __slots__ = ("hello", "open", "window", "close", "reach", "further")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    FURTHER_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.Hello
    open: OpenDraft
    window: SetWindow
    close: CloseDraft
    reach: ReachVerifier
    further: _containers.RepeatedCompositeFieldContainer[DrafterCommand]
    def __init__(self, hello: _Optional[_Union[_common_pb2.Hello, _Mapping]] = ..., open: _Optional[_Union[OpenDraft, _Mapping]] = ..., window: _Optional[_Union[SetWindow, _Mapping]] = ..., close: _Optional[_Union[CloseDraft, _Mapping]] = ..., reach: _Optional[_Union[ReachVerifier, _Mapping]] = ..., further: _Optional[_Iterable[_Union[DrafterCommand, _Mapping]]] = ...) -> None: ...

class ReachVerifier(_message.Message):
    __slots__ = ("verifier_address",)
    VERIFIER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    verifier_address: str
    def __init__(self, verifier_address: _Optional[str] = ...) -> None: ...

class OpenDraft(_message.Message):
    __slots__ = ("session_id", "params", "output", "verifier_address", "draft_key", "window", "target_vocab_size", "target", "opening", "traceparent", "tracestate")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_KEY_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    TARGET_VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    params: _common_pb2.SessionParams
    output: _containers.RepeatedScalarFieldContainer[int]
    verifier_address: str
    draft_key: bytes
    window: int
    target_vocab_size: int
    target: str
    opening: int
    traceparent: str
    tracestate: str
    def __init__(self, session_id: _Optional[bytes] = ..., params: _Optional[_Union[_common_pb2.SessionParams, _Mapping]] = ..., output: _Optional[_Iterable[int]] = ..., verifier_address: _Optional[str] = ..., draft_key: _Optional[bytes] = ..., window: _Optional[int] = ..., target_vocab_size: _Optional[int] = ..., target: _Optional[str] = ..., opening: _Optional[int] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ...) -> None: ...

class SetWindow(_message.Message):
    __slots__ = ("session_id", "window", "opening")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    window: int
    opening: int
    def __init__(self, session_id: _Optional[bytes] = ..., window: _Optional[int] = ..., opening: _Optional[int] = ...) -> None: ...

class CloseDraft(_message.Message):
    __slots__ = ("session_id", "opening")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    opening: int
    def __init__(self, session_id: _Optional[bytes] = ..., opening: _Optional[int] = ...) -> None: ...

class DrafterEvents(_message.Message):
    __slots__ = ("hello", "info", "ended", "reached", "load")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.Hello
    info: _common_pb2.WorkerInfo
    ended: _containers.RepeatedCompositeFieldContainer[DraftEnded]
    reached: ReachedVerifier
    load: DrafterLoad
    def __init__(self, hello: _Optional[_Union[_common_pb2.Hello, _Mapping]] = ..., info: _Optional[_Union[_common_pb2.WorkerInfo, _Mapping]] = ..., ended: _Optional[_Iterable[_Union[DraftEnded, _Mapping]]] = ..., reached: _Optional[_Union[ReachedVerifier, _Mapping]] = ..., load: _Optional[_Union[DrafterLoad, _Mapping]] = ...) -> None: ...

class ReachedVerifier(_message.Message):
    __slots__ = ("trouble",)
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    trouble: str
    def __init__(self, trouble: _Optional[str] = ...) -> None: ...

class DraftEnded(_message.Message):
    __slots__ = ("session_id", "reason", "opening", "cause")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    reason: str
    opening: int
    cause: DraftEndCause
    def __init__(self, session_id: _Optional[bytes] = ..., reason: _Optional[str] = ..., opening: _Optional[int] = ..., cause: _Optional[_Union[DraftEndCause, str]] = ...) -> None: ...

class DrafterLoad(_message.Message):
    __slots__ = ("sessions", "token_seconds", "busy", "kv_usage", "round_trip_seconds", "round_trips", "rejections", "rejections_covered")
    class RoundTripsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIPS_FIELD_NUMBER: _ClassVar[int]
    REJECTIONS_FIELD_NUMBER: _ClassVar[int]
    REJECTIONS_COVERED_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    token_seconds: float
    busy: float
    kv_usage: float
    round_trip_seconds: float
    round_trips: _containers.ScalarMap[str, float]
    rejections: int
    rejections_covered: int
    def __init__(self, sessions: _Optional[int] = ..., token_seconds: _Optional[float] = ..., busy: _Optional[float] = ..., kv_usage: _Optional[float] = ..., round_trip_seconds: _Optional[float] = ..., round_trips: _Optional[_Mapping[str, float]] = ..., rejections: _Optional[int] = ..., rejections_covered: _Optional[int] = ...) -> None: ...
