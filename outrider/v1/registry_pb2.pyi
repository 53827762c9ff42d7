from outrider.v1 import common_pb2 as _common_pb2
from outrider.v1 import drafter_pb2 as _drafter_pb2
from outrider.v1 import verifier_pb2 as _verifier_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Registration(_message.Message):
    __slots__ = ("info", "address", "verifier_load", "drafter_load", "join_address")
    INFO_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_LOAD_FIELD_NUMBER: _ClassVar[int]
    JOIN_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    info: _common_pb2.WorkerInfo
    address: str
    verifier_load: _verifier_pb2.VerifierLoad
    drafter_load: _drafter_pb2.DrafterLoad
    join_address: str
    def __init__(self, info: _Optional[_Union[_common_pb2.WorkerInfo, _Mapping]] = ..., address: _Optional[str] = ..., verifier_load: _Optional[_Union[_verifier_pb2.VerifierLoad, _Mapping]] = ..., drafter_load: _Optional[_Union[_drafter_pb2.DrafterLoad, _Mapping]] = ..., join_address: _Optional[str] = ...) -> None: ...

class BeatReply(_message.Message):
    __slots__ = ("taken_in_by", "refusal", "trouble")
    TAKEN_IN_BY_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    taken_in_by: _containers.RepeatedScalarFieldContainer[str]
    refusal: str
    trouble: str
    def __init__(self, taken_in_by: _Optional[_Iterable[str]] = ..., refusal: _Optional[str] = ..., trouble: _Optional[str] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("hello",)
    HELLO_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.Hello
    def __init__(self, hello: _Optional[_Union[_common_pb2.Hello, _Mapping]] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
