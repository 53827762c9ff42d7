"""What passes on the streams comes as it was said, and what nobody could have said is refused."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from outrider.errors import InvalidRequest, PeerRefused, TooLarge, Unavailable
from outrider.sampling.params import SamplingParams
from outrider.v1 import verifier_pb2
from outrider.wire.codec import MAX_ALIASES
from outrider.wire.description import ModelInfo, TokenizerFiles, WorkerInfo, WorkerRecord
from outrider.wire.drafter_sessions import (
    CloseDraft,
    DraftEndCause,
    DraftEnded,
    DrafterCommand,
    DrafterEvents,
    OpenDraft,
    SetWindow,
)
from outrider.wire.guesses import DrafterCounts, Guess, OwnCounts
from outrider.wire.hello import MAX_NAME, Identity, Role
from outrider.wire.load import DrafterLoad, VerifierLoad
from outrider.wire.logprobs import Logprob, PromptLogprobs
from outrider.wire.methods import (
    BEAT,
    DRAFTER_SESSIONS,
    GET_INFO,
    GET_TOKENIZER,
    JOIN,
    LEAVE,
    SPECULATE,
    VERIFIER_SESSIONS,
)
from outrider.wire.registry import Answer
from outrider.wire.session import FinishReason, SessionParams
from outrider.wire.speculation import MAX_BATCH_BYTES, Attach, Commit, CommitBatch, Draft, DraftBatch
from outrider.wire.trace_context import TraceContext
from outrider.wire.verifier_sessions import (
    CancelSession,
    CloseSession,
    Committed,
    DrafterCutOff,
    EndDrafts,
    Failed,
    Finished,
    GiveBack,
    OpenSession,
    SetSpeculation,
    VerifierCommand,
    VerifierEvents,
)

ID = b"s" * 16
IDENTITY = Identity(Role.DRAFTER, "d", 2**64 - 1, "model", "tokenizer")
HELLO = IDENTITY.hello()
BOTH = (DrafterCounts(0, 2, 1, 0), DrafterCounts(2**32 - 1, 3, 1, 1))
PROMPT = PromptLogprobs(array("f", [-1.5]), array("I", [7]), array("I", [0]), array("f", [-0.5]))
PARAMS = SessionParams((1, 2), SamplingParams(seed=3), 4, (5,), guesses=True, prediction=(7, 0))
TRACE = TraceContext(2**128 - 1, 1, 1, "a=b")
MODEL = ModelInfo("m", "f", "A", 1, 2, 3, (4,), "cpu", "float32", True)
INFO = WorkerInfo(IDENTITY, MODEL, 5, 6)
SAID = [
    (VERIFIER_SESSIONS.asked, VerifierCommand(HELLO)),
    (VERIFIER_SESSIONS.asked, VerifierCommand(command=OpenSession(ID, PARAMS, (6,), 7, b"key", 8))),
    (VERIFIER_SESSIONS.asked, VerifierCommand(command=OpenSession(ID, PARAMS, (), 7, b"", 8, TRACE))),
    (VERIFIER_SESSIONS.asked, VerifierCommand(command=SetSpeculation(ID, 3, 4))),
    (VERIFIER_SESSIONS.asked, VerifierCommand(command=EndDrafts(ID, 3, 1, 2**32 - 1))),
    (VERIFIER_SESSIONS.asked, VerifierCommand(command=CloseSession(ID, 2))),
    (VERIFIER_SESSIONS.asked, VerifierCommand(command=CancelSession(ID))),
    (VERIFIER_SESSIONS.asked, VerifierCommand(command=GiveBack(ID, 2))),
    (
        VERIFIER_SESSIONS.asked,
        VerifierCommand(
            command=CloseSession(ID, 2),
            further=(
                VerifierCommand(command=SetSpeculation(ID, 3, 4)),
                VerifierCommand(command=GiveBack(ID, 2)),
            ),
        ),
    ),
    (VERIFIER_SESSIONS.answered, VerifierEvents(HELLO, load=VerifierLoad(1, 2, 0.5))),
    (
        VERIFIER_SESSIONS.answered,
        VerifierEvents(
            committed=[
                Committed(ID, 9, 1, [2, 3], 4, 5, 6),
                Committed(ID, 9, 3, [4], logprobs=(Logprob(-0.5, ((4, -0.5), (7, -1.0))),)),
                Committed(ID, 9, 3, [4, 5], 1, 2, guesses=(Guess(4, 0.5, "d"), Guess(2**31, 1.0, ""))),
                Committed(ID, 9, 3, [4], prompt=PROMPT),
                Committed(ID, 9, 3, [4], prompt=PromptLogprobs()),
                Committed(ID, 9, 3, [4, 5], 1, 2, own=OwnCounts(2, 1, 1, 1), drafters=BOTH),
            ],
            finished=[Finished(ID, 9, FinishReason.STOP)],
            cut_off=[DrafterCutOff(ID, 9, 7, "why")],
            dropped={"why": 8},
        ),
    ),
    (DRAFTER_SESSIONS.asked, DrafterCommand(HELLO)),
    (
        DRAFTER_SESSIONS.asked,
        DrafterCommand(command=OpenDraft(ID, PARAMS, (6,), "h:1", b"k", 7, 8, 9, "target", TRACE)),
    ),
    (DRAFTER_SESSIONS.asked, DrafterCommand(command=SetWindow(ID, 2, 3))),
    (DRAFTER_SESSIONS.asked, DrafterCommand(command=CloseDraft(ID, 2))),
    (
        DRAFTER_SESSIONS.asked,
        DrafterCommand(command=CloseDraft(ID, 2), further=(DrafterCommand(command=SetWindow(ID, 2, 3)),)),
    ),
    (GET_INFO[Role.DRAFTER].answered, INFO),
    (GET_TOKENIZER[Role.DRAFTER].answered, TokenizerFiles("h", "{}", "", {"a": "b"})),
    (BEAT.asked, WorkerRecord(INFO, "h:1", DrafterLoad(1, round_trips={"v": 0.5}))),
    (BEAT.asked, WorkerRecord(INFO, "h:1", join_address="h:2")),
    (BEAT.answered, Answer(("r",), "no", "later")),
    (LEAVE.asked, IDENTITY),
]


@pytest.mark.parametrize(("codec", "said"), SAID)
def test_what_is_said_comes_as_it_was_said(codec: Any, said: Any) -> None:
    assert codec.from_bytes(codec.to_bytes(said)) == said


@pytest.mark.parametrize(
    ("codec", "said"),
    [
        (VERIFIER_SESSIONS.asked, VerifierCommand(command=CloseSession(ID, 2))),
        (DRAFTER_SESSIONS.asked, DrafterCommand(command=CloseDraft(ID, 2))),
    ],
)
def test_a_message_has_so_many_commands(codec: Any, said: Any) -> None:
    """400,000 of them held a verifier's loop for 5 to 7 s."""
    most = replace(said, further=(said,) * 256)
    assert codec.from_bytes(codec.to_bytes(most)) == most
    with pytest.raises(InvalidRequest, match="257 commands follow another; at most 256 may"):
        codec.from_bytes(codec.to_bytes(replace(said, further=(said,) * 257)))


def test_a_failure_keeps_its_kind_and_its_sentence() -> None:
    raw = VERIFIER_SESSIONS.answered.to_bytes(VerifierEvents(failed=[Failed(ID, 9, Unavailable("away"))]))
    (failed,) = VERIFIER_SESSIONS.answered.from_bytes(raw).failed
    assert (failed.session_id, failed.opening, type(failed.error), failed.error.message) == (
        ID,
        9,
        Unavailable,
        "away",
    )


def test_what_drafters_send_is_unpacked_piece_by_piece() -> None:
    said = DraftBatch(HELLO, [Attach(ID, b"k")], [Draft(ID, 1, [2, 3], [-1, 0], b"\xff\x00")] * 2, 4)
    heard = SPECULATE.asked.from_bytes(SPECULATE.asked.to_bytes(said))
    assert isinstance(heard.attach, Iterator) and isinstance(heard.drafts, Iterator)
    assert replace(heard, attach=list(heard.attach), drafts=list(heard.drafts)) == said


def test_what_a_verifier_commits_is_unpacked_piece_by_piece() -> None:
    said = CommitBatch(HELLO, [Commit(ID, 1, [2, 3])], [Attach(ID, b"k")], 4, 5, beside=0.25)
    heard = SPECULATE.answered.from_bytes(SPECULATE.answered.to_bytes(said))
    assert isinstance(heard.commits, Iterator) and isinstance(heard.revoked, Iterator)
    assert replace(heard, commits=list(heard.commits), revoked=list(heard.revoked)) == said


def test_what_a_drafter_ends_is_unpacked_piece_by_piece() -> None:
    said = DrafterEvents(None, [DraftEnded(ID, DraftEndCause.UNREACHED, "why", 3)], DrafterLoad(4))
    heard = DRAFTER_SESSIONS.answered.from_bytes(DRAFTER_SESSIONS.answered.to_bytes(said))
    assert isinstance(heard.ended, Iterator)
    assert replace(heard, ended=list(heard.ended)) == said


def test_who_joins_says_what_it_is_and_is_a_drafter() -> None:
    assert JOIN.asked.from_bytes(JOIN.asked.to_bytes(DrafterEvents(info=INFO))).info == INFO
    verifier = replace(INFO, identity=replace(IDENTITY, role=Role.VERIFIER))
    with pytest.raises(PeerRefused, match="expected a drafter here; the peer's role is ROLE_VERIFIER"):
        JOIN.asked.from_bytes(JOIN.asked.to_bytes(DrafterEvents(info=verifier)))
    forged = replace(INFO, identity=replace(IDENTITY, worker_id="d\nrouter: all is well"))
    with pytest.raises(InvalidRequest, match="printable"):
        JOIN.asked.from_bytes(JOIN.asked.to_bytes(DrafterEvents(info=forged)))


LONG = "n" * (MAX_NAME + 1)


@pytest.mark.parametrize(
    "info",
    [
        *(
            replace(INFO, identity=replace(IDENTITY, **{name: LONG}))
            for name in ("worker_id", "model_fingerprint", "tokenizer_hash")
        ),
        *(
            replace(INFO, model=replace(MODEL, **{name: LONG}))
            for name in ("name", "fingerprint", "architecture", "device", "dtype", "quantization", "numerics")
        ),
        replace(INFO, model=replace(MODEL, aliases=(LONG,))),
        replace(INFO, model=replace(MODEL, aliases=("a",) * (MAX_ALIASES + 1))),
    ],
)
def test_what_a_worker_is_called_is_short_however_it_registers(info: WorkerInfo) -> None:
    """Routers remember by it: of a fingerprint of 100 KB they remembered all of it."""
    for codec, said in ((JOIN.asked, DrafterEvents(info=info)), (BEAT.asked, WorkerRecord(info, "h:1"))):
        with pytest.raises((InvalidRequest, PeerRefused), match="at most 256 characters"):
            codec.from_bytes(codec.to_bytes(said))


def test_the_addresses_in_a_drafter_s_load_are_short() -> None:
    said = DrafterEvents(load=DrafterLoad(1, round_trips={LONG: 0.1}))
    with pytest.raises(InvalidRequest, match="at most 256 characters"):
        DRAFTER_SESSIONS.answered.from_bytes(DRAFTER_SESSIONS.answered.to_bytes(said))


def test_what_is_no_message_or_too_large_a_one_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="the bytes are no VerifierEvents"):
        VERIFIER_SESSIONS.answered.from_bytes(b"\xff" * 9)
    with pytest.raises(TooLarge, match="a DraftBatch may have at most 1048576 bytes, not 1048577"):
        SPECULATE.asked.from_bytes(b"\xff" * (MAX_BATCH_BYTES + 1))


def test_a_finish_reason_that_does_not_exist_is_refused() -> None:
    message = verifier_pb2.VerifierEvents()
    message.finished.add(session_id=ID, reason=77)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="there is no finish reason 77"):
        VERIFIER_SESSIONS.answered.from_bytes(message.SerializeToString())


def test_a_command_of_a_kind_that_is_not_known_is_none() -> None:
    assert VERIFIER_SESSIONS.asked.from_bytes(b"") == VerifierCommand()


def test_who_is_no_worker_neither_beats_nor_leaves() -> None:
    router = Identity(Role.ROUTER, "r", 1)
    with pytest.raises(PeerRefused, match="expected a verifier here; the peer's role is ROLE_ROUTER"):
        BEAT.asked.from_bytes(BEAT.asked.to_bytes(WorkerRecord(replace(INFO, identity=router), "h:1")))
    with pytest.raises(PeerRefused, match="expected a verifier here; the peer's role is ROLE_ROUTER"):
        LEAVE.asked.from_bytes(LEAVE.asked.to_bytes(router))
