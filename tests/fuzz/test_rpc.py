"""Every RPC takes anything: it refuses with a status that says so, never fails, and serves on as before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from outrider.v1 import (
    common_pb2,
    drafter_pb2,
    generation_pb2,
    registry_pb2,
    verifier_pb2,
)
from outrider.wire.hello import PROTOCOL_VERSION
from tests.fuzz.conftest import ANSWER_SECONDS, PROMPT, Service, fuzzed
from tests.fuzz.messages import Values, damaged, integers, messages

pytestmark = [pytest.mark.process, pytest.mark.fuzz, pytest.mark.timeout(3600)]

FAILED = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED}
MOST_ANSWERS = 4  # read of one call before its client leaves: some texts are long
SESSIONS = [bytes([number]) * 16 for number in range(3)]
KEYS = [b"k" * 16, b"l" * 16]
VALUES: Values = {
    "session_id": st.one_of(st.sampled_from(SESSIONS), st.binary(max_size=20)),
    "draft_key": st.one_of(st.sampled_from(KEYS), st.binary(max_size=80)),
    "prompt": st.one_of(st.just(PROMPT), st.lists(integers(0, 2**32 - 1), max_size=8)),
    "output": st.one_of(st.just([]), st.lists(integers(0, 2**32 - 1), max_size=8)),
    "max_tokens": st.one_of(st.integers(1, 30), integers(0, 2**32 - 1)),
    "verifier_address": st.sampled_from(["127.0.0.1:1", "", "nonsense", "[::1", "127.0.0.1:99999"]),
    "Registration.address": st.sampled_from(["127.0.0.1:1", "", "nonsense", "[::1", "127.0.0.1:99999"]),
    "GenerateRequest.text": st.text(min_size=1, max_size=60),
    "GenerateRequest.model": st.sampled_from(["", "", "target", "\0", "x" * 2000]),
    "TokenIds.ids": st.one_of(st.just(PROMPT), st.lists(integers(0, 2**32 - 1), max_size=8)),
    "temperature": st.one_of(st.sampled_from([0.0, 0.8, 1.0]), st.floats()),
    "GenerateRequest.stop": st.lists(st.text(max_size=3), max_size=18),
    "Tool.name": st.one_of(st.sampled_from(["f", "g"]), st.text(max_size=5)),
    "Tool.parameters": st.sampled_from(['{"type": "object"}', "{}", "[", "5", '{"enum": [1]}', "{" * 99]),
    "ToolChoice.name": st.sampled_from(["f", "g", ""]),
    "StructuredOutputs.structural_tag": st.sampled_from(["{}", "[", '{"structures": [], "triggers": []}']),
    "ChatMessage.role": st.sampled_from(["system", "user", "assistant", "tool", ""]),
    "CancelRequest.id": st.one_of(st.just("00" * 16), st.text(max_size=40)),
    "ResumeRequest.id": st.one_of(st.just("00" * 16), st.text(max_size=40)),
    "hello": st.none(),  # said first, and sometimes once more
}


def hellos(role: int, tokenizer_hash: str) -> st.SearchStrategy[common_pb2.Hello]:
    """Mostly one that fits."""
    fits = common_pb2.Hello(
        protocol_version=PROTOCOL_VERSION,
        role=role,
        worker_id="fuzz",
        incarnation=1,
        tokenizer_hash=tokenizer_hash,
    )
    return st.one_of(st.just(fits), st.just(fits), st.just(fits), messages(common_pb2.Hello, {}))


class Caller:
    """Calls a method with bytes, and judges how it ended."""

    def __init__(self, address: str, method: str, streaming: bool) -> None:
        self._channel = grpc.insecure_channel(address)
        make = self._channel.stream_stream if streaming else self._channel.unary_stream
        self._call: Callable[..., Any] = make(f"/outrider.v1.{method}")

    def close(self) -> None:
        self._channel.close()

    def __call__(self, request: bytes | Iterator[bytes]) -> list[bytes]:
        """The first answers. Anything but a clear end or refusal is an error of the server's."""
        call = self._call(request, timeout=ANSWER_SECONDS)
        answers: list[bytes] = []
        try:
            for answer in call:
                answers.append(answer)
                if len(answers) >= MOST_ANSWERS:
                    call.cancel()
                    return answers
        except grpc.RpcError as error:
            assert error.code() not in FAILED, f"{error.code()}: {error.details()}"
        return answers


UNARY: list[tuple[str, str, type[Message]]] = [
    ("router", "Generation/Generate", generation_pb2.GenerateRequest),
    ("router", "Generation/Resume", generation_pb2.ResumeRequest),
    ("router", "Generation/Cancel", generation_pb2.CancelRequest),
    ("router", "Registry/Beat", registry_pb2.Registration),
    ("router", "Registry/Leave", registry_pb2.LeaveRequest),
    ("verifier", "Verifier/GetInfo", common_pb2.GetInfoRequest),
    ("verifier", "Verifier/GetTokenizer", common_pb2.GetTokenizerRequest),
    ("drafter", "Drafter/GetInfo", common_pb2.GetInfoRequest),
    ("drafter", "Drafter/GetTokenizer", common_pb2.GetTokenizerRequest),
]
STREAMS: list[tuple[str, str, type[Message], int]] = [
    ("verifier", "Verifier/Sessions", verifier_pb2.VerifierCommand, common_pb2.ROLE_ROUTER),
    ("verifier", "Verifier/Speculate", verifier_pb2.DraftBatch, common_pb2.ROLE_DRAFTER),
    ("drafter", "Drafter/Sessions", drafter_pb2.DrafterCommand, common_pb2.ROLE_ROUTER),
]
UNARY_SHARE = {"Generation/Generate": 0.25, "Registry/Beat": 0.05}  # of all inputs; a stream's is larger
FEW = 0.01
STREAM_SHARE = 0.1  # each message of a stream is an input; there are about three
A_STREAM = 3


@pytest.mark.parametrize(("where", "method", "kind"), UNARY, ids=[method for _, method, _ in UNARY])
def test_a_call_takes_any_message(service: Service, where: str, method: str, kind: type[Message]) -> None:
    caller = Caller(getattr(service, where), method, streaming=False)
    values = VALUES
    if kind in (registry_pb2.Registration, registry_pb2.LeaveRequest):
        values = {**VALUES, "hello": hellos(common_pb2.ROLE_VERIFIER, "")}
    whole = messages(kind, values)

    @fuzzed(UNARY_SHARE.get(method, FEW))
    @given(st.one_of(whole.map(lambda message: message.SerializeToString()), damaged(whole)))
    def send(request: bytes) -> None:
        caller(request)

    try:
        send()
    finally:
        caller.close()
    service.check()


@pytest.mark.parametrize(
    ("where", "method", "kind", "role"), STREAMS, ids=[method for _, method, _, _ in STREAMS]
)
def test_a_stream_takes_any_messages(
    service: Service, where: str, method: str, kind: type[Message], role: int
) -> None:
    caller = Caller(getattr(service, where), method, streaming=True)
    hash_ = _tokenizer_hash(service)
    whole = messages(kind, VALUES)
    first = hellos(role, hash_).map(lambda hello: kind(hello=hello).SerializeToString())
    proper = whole.map(lambda message: message.SerializeToString())
    rest = st.lists(st.one_of(proper, proper, proper, damaged(whole), first), max_size=2 * A_STREAM)
    opening = st.one_of(first, first, first, first, proper, st.binary(max_size=30))

    @fuzzed(STREAM_SHARE / A_STREAM)
    @given(opening, rest)
    def talk(opening: bytes, rest: list[bytes]) -> None:
        caller(iter([opening, *rest]))

    try:
        talk()
    finally:
        caller.close()
    service.check()


def _tokenizer_hash(service: Service) -> str:
    with grpc.insecure_channel(service.verifier) as channel:
        ask = channel.unary_unary("/outrider.v1.Verifier/GetInfo")
        return common_pb2.WorkerInfo.FromString(ask(b"", timeout=ANSWER_SECONDS)).hello.tokenizer_hash
