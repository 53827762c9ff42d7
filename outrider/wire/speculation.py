"""What passes between a drafter and a verifier: drafts, and what the target made of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.v1 import verifier_pb2
from outrider.wire.codec import Codec
from outrider.wire.hello import Hello, hello_from_wire, hello_to_wire

MAX_BATCH_BYTES = 2**20  # some thousand sessions' drafts
MAX_COMMITS_BYTES = 2 * 2**20


@dataclass(frozen=True, slots=True)
class Attach:
    """Claims the right to draft for a session; from a verifier, one that stands no more."""

    session_id: bytes
    draft_key: bytes  # the right, as the router gave it


class Draft(NamedTuple):
    """Guesses that these tokens stand at positions base and following."""

    session_id: bytes
    base: int  # of the first guessed token: the log's length as the drafter knows it
    tokens: list[int]  # a path, or a tree in topological order
    parents: Sequence[int] = ()  # index into tokens of each one's parent, -1 = the log's end; empty = a chain
    survival: bytes = b""  # P(this and all before it are accepted) * 255 of each token; empty = 255 each


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """From a drafter: its hello, or what one draft step produced. What has come can be read once, piece by
    piece: so whoever reads it decides how much of an untrusted batch is unpacked at a time."""

    hello: Hello | None = None
    attach: Iterable[Attach] = ()
    drafts: Iterable[Draft] = ()
    stamp_us: int = 0  # the drafter's clock at sending; echoed to measure the round trip


class Commit(NamedTuple):
    """Tells that these tokens stand at positions base and following."""

    session_id: bytes
    base: int
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class CommitBatch:
    """To a drafter: the verifier's hello, or what one target step committed. What has come can be read once,
    piece by piece."""

    hello: Hello | None = None
    commits: Iterable[Commit] = ()
    revoked: Iterable[Attach] = ()  # claims that stand no more
    echo_us: int = 0  # stamp_us of the last DraftBatch received; 0 = none yet
    held_us: int = 0  # time between that receipt and this sending
    rest: bool = False  # no drafts are taken for now, and no commits told
    beside: float = 0.0  # P(accepted) that a token beside the likeliest path is verified with; 0 = none is


def _batch_to_wire(batch: DraftBatch) -> verifier_pb2.DraftBatch:
    return verifier_pb2.DraftBatch(
        hello=hello_to_wire(batch.hello),
        attach=_claims_to_wire(batch.attach),
        drafts=[draft._asdict() for draft in batch.drafts],  # by the same names
        stamp_us=batch.stamp_us,
    )


def _claims_to_wire(claims: Iterable[Attach]) -> list[verifier_pb2.Attach]:
    return [verifier_pb2.Attach(session_id=one.session_id, draft_key=one.draft_key) for one in claims]


def _batch_from_wire(message: verifier_pb2.DraftBatch) -> DraftBatch:
    return DraftBatch(
        hello_from_wire(message),
        map(_attach_from_wire, message.attach),
        map(_draft_from_wire, message.drafts),
        message.stamp_us,
    )


def _attach_from_wire(message: verifier_pb2.Attach) -> Attach:
    return Attach(message.session_id, message.draft_key)


def _draft_from_wire(message: verifier_pb2.Draft) -> Draft:
    # A slice takes half of the time of a list that is made of them.
    return Draft(message.session_id, message.base, message.tokens[:], message.parents[:], message.survival)


def _commits_to_wire(batch: CommitBatch) -> verifier_pb2.CommitBatch:
    return verifier_pb2.CommitBatch(
        hello=hello_to_wire(batch.hello),
        commits=[commit._asdict() for commit in batch.commits],
        revoked=_claims_to_wire(batch.revoked),
        echo_us=batch.echo_us,
        held_us=batch.held_us,
        rest=batch.rest,
        beside=batch.beside,
    )


def _commits_from_wire(message: verifier_pb2.CommitBatch) -> CommitBatch:
    return CommitBatch(
        hello_from_wire(message),
        (Commit(one.session_id, one.base, one.tokens[:]) for one in message.commits),
        map(_attach_from_wire, message.revoked),
        message.echo_us,
        message.held_us,
        message.rest,
        message.beside,
    )


DRAFTS = Codec(verifier_pb2.DraftBatch, _batch_to_wire, _batch_from_wire, MAX_BATCH_BYTES)
COMMITS = Codec(verifier_pb2.CommitBatch, _commits_to_wire, _commits_from_wire, MAX_COMMITS_BYTES)
