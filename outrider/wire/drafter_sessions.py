"""What passes between a router and a drafter: whom to draft for, and when that is over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum

from outrider.v1 import common_pb2, drafter_pb2
from outrider.wire.codec import (
    MAX_BYTES,
    Codec,
    check_named,
    drafter_load_from_wire,
    drafter_load_to_wire,
    further_from_wire,
    params_from_wire,
    params_to_wire,
    worker_info_from_wire,
    worker_info_to_wire,
)
from outrider.wire.description import WorkerInfo
from outrider.wire.hello import Hello, Role, check_hello, hello_from_wire, hello_to_wire
from outrider.wire.load import DrafterLoad
from outrider.wire.session import SessionParams
from outrider.wire.trace_context import TraceContext

MOST_ENDED = 256  # sessions in one message
MAX_EVENTS_BYTES = 2**18  # so many with their reasons, and the round trips to some thousand verifiers


@dataclass(frozen=True, slots=True)
class OpenDraft:
    """Starts drafting for a session."""

    session_id: bytes
    params: SessionParams
    output: tuple[int, ...]  # committed so far
    verifier_address: str  # host:port whose Speculate stream takes the drafts
    draft_key: bytes  # presented to the verifier
    window: int  # most unverified tokens ahead of the log
    target_vocab_size: int  # ids at or above it are never drafted
    opening: int  # number of this command on its stream
    target: str = ""  # fingerprint of the target model
    trace: TraceContext | None = None  # to which belongs what is done for it


@dataclass(frozen=True, slots=True)
class SetWindow:
    session_id: bytes
    opening: int  # of the OpenDraft that is meant
    window: int


@dataclass(frozen=True, slots=True)
class CloseDraft:
    session_id: bytes
    opening: int  # of the OpenDraft that is meant


@dataclass(frozen=True, slots=True)
class ReachVerifier:
    """Asks the drafter to find out if it reaches a verifier of which it may get sessions."""

    address: str  # host:port


@dataclass(frozen=True, slots=True)
class DrafterCommand:
    """From a router: its hello, or a command; without either it is of a kind that is not known here."""

    hello: Hello | None = None
    command: OpenDraft | SetWindow | CloseDraft | ReachVerifier | None = None
    further: tuple[DrafterCommand, ...] = ()  # that follow it, and have none themselves


class DraftEndCause(IntEnum):
    """Why a drafter stops drafting for a session by itself; the values are outrider.v1.DraftEndCause's."""

    UNSPECIFIED = 0
    UNFIT = 1  # the session asks for what this drafter cannot do
    UNREACHED = 2  # its drafts do not reach the verifier, or are not let in there
    CUT_OFF = 3  # the drafter cut the verifier off, which said what none may
    REVOKED = 4  # the verifier has the session no more
    FAILED = 5  # the draft model did not take it


_CAUSES = frozenset(DraftEndCause)


@dataclass(frozen=True, slots=True)
class DraftEnded:
    """The drafter stopped drafting for a session by itself."""

    session_id: bytes
    cause: DraftEndCause
    reason: str
    opening: int  # of the OpenDraft that is over


@dataclass(frozen=True, slots=True)
class DrafterEvents:
    """To a router: the drafter's hello, or how it is. What has come of `ended` can be read once, piece by
    piece. `info`: first of all on a stream that the drafter opened. `reached`: the answer to the last
    ReachVerifier, a sentence that says why it does not reach it; empty = it does."""

    hello: Hello | None = None
    ended: Iterable[DraftEnded] = ()
    load: DrafterLoad | None = None
    info: WorkerInfo | None = None
    reached: str | None = None


def _commands_to_wire(said: DrafterCommand) -> drafter_pb2.DrafterCommand:
    message = _command_to_wire(said)
    message.further.extend(map(_command_to_wire, said.further))
    return message


def _commands_from_wire(message: drafter_pb2.DrafterCommand) -> DrafterCommand:
    further = further_from_wire(message.further, _command_from_wire)
    return replace(_command_from_wire(message), further=further)


def _command_to_wire(said: DrafterCommand) -> drafter_pb2.DrafterCommand:
    match said.command:
        case OpenDraft() as asked:
            opened = drafter_pb2.OpenDraft(
                session_id=asked.session_id,
                params=params_to_wire(asked.params),
                output=asked.output,
                verifier_address=asked.verifier_address,
                draft_key=asked.draft_key,
                window=asked.window,
                target_vocab_size=asked.target_vocab_size,
                opening=asked.opening,
                target=asked.target,
                **({} if asked.trace is None else asked.trace.fields),
            )
            return drafter_pb2.DrafterCommand(open=opened)
        case SetWindow(session_id, opening, window):
            change = drafter_pb2.SetWindow(session_id=session_id, opening=opening, window=window)
            return drafter_pb2.DrafterCommand(window=change)
        case CloseDraft(session_id, opening):
            closed = drafter_pb2.CloseDraft(session_id=session_id, opening=opening)
            return drafter_pb2.DrafterCommand(close=closed)
        case ReachVerifier(address):
            return drafter_pb2.DrafterCommand(reach=drafter_pb2.ReachVerifier(verifier_address=address))
    return drafter_pb2.DrafterCommand(hello=hello_to_wire(said.hello))


def _command_from_wire(message: drafter_pb2.DrafterCommand) -> DrafterCommand:
    match message.WhichOneof("command"):
        case "open":
            asked = message.open
            opened = OpenDraft(
                asked.session_id,
                params_from_wire(asked.params),
                tuple(asked.output),
                asked.verifier_address,
                asked.draft_key,
                asked.window,
                asked.target_vocab_size,
                asked.opening,
                asked.target,
                TraceContext.of(asked),
            )
            return DrafterCommand(command=opened)
        case "window":
            change = message.window
            return DrafterCommand(command=SetWindow(change.session_id, change.opening, change.window))
        case "close":
            return DrafterCommand(command=CloseDraft(message.close.session_id, message.close.opening))
        case "reach":
            return DrafterCommand(command=ReachVerifier(message.reach.verifier_address))
    return DrafterCommand(hello=hello_from_wire(message))


def _events_to_wire(events: DrafterEvents) -> drafter_pb2.DrafterEvents:
    return drafter_pb2.DrafterEvents(
        hello=hello_to_wire(events.hello),
        ended=[
            drafter_pb2.DraftEnded(
                session_id=end.session_id,
                reason=end.reason,
                opening=end.opening,
                cause=int(end.cause),  # type: ignore[arg-type]  # the stubs take names alone
            )
            for end in events.ended
        ],
        load=None if events.load is None else drafter_load_to_wire(events.load),
        info=None if events.info is None else worker_info_to_wire(events.info),
        reached=None if events.reached is None else drafter_pb2.ReachedVerifier(trouble=events.reached),
    )


def _cause_from_wire(number: int) -> DraftEndCause:
    """A cause that is not known here, of a newer drafter, is none."""
    return DraftEndCause(number) if number in _CAUSES else DraftEndCause.UNSPECIFIED


def _events_from_wire(message: drafter_pb2.DrafterEvents) -> DrafterEvents:
    return DrafterEvents(
        hello_from_wire(message),
        (
            DraftEnded(end.session_id, _cause_from_wire(end.cause), end.reason, end.opening)
            for end in message.ended
        ),
        drafter_load_from_wire(message.load) if message.HasField("load") else None,
        _info_from_wire(message.info) if message.HasField("info") else None,
        message.reached.trouble if message.HasField("reached") else None,
    )


def _info_from_wire(message: common_pb2.WorkerInfo) -> WorkerInfo:
    """Returns a drafter's description. Raises PeerRefused if it is no drafter of this release."""
    check_hello(hello_from_wire(message), Role.DRAFTER)
    info = worker_info_from_wire(message)
    check_named(info)
    return info


COMMANDS = Codec(drafter_pb2.DrafterCommand, _commands_to_wire, _commands_from_wire, MAX_BYTES)
EVENTS = Codec(drafter_pb2.DrafterEvents, _events_to_wire, _events_from_wire, MAX_EVENTS_BYTES)
