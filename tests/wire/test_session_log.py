"""Records of a session's log."""

from __future__ import annotations

from array import array

import pytest

from outrider.errors import InvalidRequest
from outrider.sampling.params import SamplingParams
from outrider.v1 import session_pb2
from outrider.wire.guesses import NO_OWN, DrafterCounts, Guess, OwnCounts
from outrider.wire.logprobs import Logprob, PromptLogprobs
from outrider.wire.session import FinishReason, SessionParams
from outrider.wire.session_log import (
    LoggedRequest,
    SessionLog,
    end_record,
    log_from_bytes,
    request_record,
    step_record,
)

SAMPLING = SamplingParams(0.7, 5, 0.9, 0.1, 0.25, -0.5, 1.25, {4: 1.5, 0: -100.0}, 2**64 - 1)
REQUEST = LoggedRequest(
    model="m/ö",
    fingerprint="ab",
    params=SessionParams((1, 0, 2**31), SAMPLING, 7, (2, 3), b"\xff salt", prediction=(0, 2**31)),
    num_speculative_tokens=None,
    answer=b"\x00\xff",
    owner="alice",
)
STEPS = [
    (
        (0, 5),
        1,
        4,
        3,
        "float32-1",
        (Logprob(-0.5, ((7, -0.25), (0, -0.5))), Logprob(-2.0, ((5, 0.0), (9, -3.0)))),
        (Guess(0, 0.5, "a"), Guess(2**31, 1.0, ""), Guess(1, 0.0, "ö"), Guess(1, 0.25, "a")),
        PromptLogprobs(array("f", [-1.5]), array("I", [7]), array("I", [0]), array("f", [-0.5])),
        7,
        OwnCounts(4, 1, 2, 1),
        (DrafterCounts(0, 4, 1, 2, "m"), DrafterCounts(3, 2, 0, 0, "ö")),
    ),
    ((7,), 0, 0, 0, "", (Logprob(-1.5),), (), None, 0, NO_OWN, ()),
    ((2**31, 8, 9), 2, 2, 0, "int8-2", (), (), PromptLogprobs(), 2**31, OwnCounts(2, 2, 0, 0), ()),
]


@pytest.mark.parametrize("end", [None, *FinishReason])
@pytest.mark.parametrize("k", [None, 0, 3])
def test_records_one_after_the_other_are_the_log(end: FinishReason | None, k: int | None) -> None:
    request = LoggedRequest(**{**_fields(REQUEST), "num_speculative_tokens": k})
    records = [request_record(request), *(step_record(*step) for step in STEPS)]
    records += [] if end is None else [end_record(end)]
    assert log_from_bytes(b"".join(records)) == SessionLog(request, STEPS, end)


def test_a_log_that_only_begins_is_one() -> None:
    assert log_from_bytes(request_record(REQUEST)) == SessionLog(REQUEST, [], None)


@pytest.mark.parametrize("raw", [b"", b"\xff", step_record(*STEPS[0]), request_record(REQUEST)[:-1]])
def test_other_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        log_from_bytes(raw)


def test_a_log_of_another_version_is_refused_by_a_sentence() -> None:
    message = session_pb2.SessionLog.FromString(request_record(REQUEST))
    message.request.protocol_version = 2
    with pytest.raises(InvalidRequest, match="protocol version 2, this side reads 5: send the request again"):
        log_from_bytes(message.SerializeToString())


def _fields(request: LoggedRequest) -> dict[str, object]:
    return {name: getattr(request, name) for name in LoggedRequest.__slots__}
