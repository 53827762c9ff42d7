"""What passes between a router and a verifier: commands, and what steps made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from outrider.errors import OutriderError, TooLarge, from_grpc_code
from outrider.v1 import verifier_pb2
from outrider.wire.codec import (
    MAX_BYTES,
    Codec,
    finish_reason_from_wire,
    further_from_wire,
    params_from_wire,
    params_to_wire,
    verifier_load_from_wire,
    verifier_load_to_wire,
)
from outrider.wire.guesses import (
    NO_OWN,
    DrafterCounts,
    Guesses,
    OwnCounts,
    drafters_from_wire,
    drafters_to_wire,
    guesses_from_wire,
    guesses_to_wire,
    own_from_wire,
    own_to_wire,
)
from outrider.wire.hello import Hello, hello_from_wire, hello_to_wire
from outrider.wire.load import VerifierLoad
from outrider.wire.logprobs import (
    Logprobs,
    PromptLogprobs,
    from_numbers,
    numbers,
    prompt_from_wire,
    prompt_to_wire,
)
from outrider.wire.session import FinishReason, SessionParams
from outrider.wire.trace_context import TraceContext

MOST_ENTRIES = 2**14  # of a message: each takes microseconds to read
ENTRY_NUMBERS = 8  # that take as long
ENTRY_BYTES = 2  # at least


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Starts a session, or goes on with one that runs there still."""

    session_id: bytes
    params: SessionParams
    output: tuple[int, ...]  # committed before
    num_speculative_tokens: int  # most draft tokens to verify in one step
    draft_key: bytes  # from which its drafters' rights follow; empty = nobody
    opening: int  # number of this command on its stream: whatever else is said of the session carries it
    trace: TraceContext | None = None  # to which belongs what is done for it


@dataclass(frozen=True, slots=True)
class SetSpeculation:
    session_id: bytes
    opening: int
    num_speculative_tokens: int


@dataclass(frozen=True, slots=True)
class EndDrafts:
    """Nobody drafts for a session from a seat, until another has its turn there."""

    session_id: bytes
    opening: int
    seat: int  # from 0
    turn: int  # of the last drafter that had it


@dataclass(frozen=True, slots=True)
class CloseSession:
    session_id: bytes
    opening: int


@dataclass(frozen=True, slots=True)
class CancelSession:
    """Ends a session that another router opened, or is about to."""

    session_id: bytes


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Ends a session of this router that no step there has run yet."""

    session_id: bytes
    opening: int


Command = OpenSession | SetSpeculation | EndDrafts | CloseSession | CancelSession | GiveBack


@dataclass(frozen=True, slots=True)
class VerifierCommand:
    """From a router: its hello, or a command; without either it is of a kind that is not known here."""

    hello: Hello | None = None
    command: Command | None = None
    further: tuple[VerifierCommand, ...] = ()  # that follow it, and have none themselves


class Committed(NamedTuple):
    """Output tokens that a step fixed for a session."""

    session_id: bytes
    opening: int
    base: int  # position of tokens[0]
    tokens: Sequence[int]
    accepted: int = 0  # draft tokens accepted in this step
    verified: int = 0  # draft tokens verified in this step
    cached_prompt_tokens: int = 0  # with a session's first output
    logprobs: Logprobs = ()  # of the tokens, if asked for
    guesses: Guesses = ()  # the draft tokens verified, if asked for
    prompt: PromptLogprobs | None = None  # with a session's first output, if asked for
    beside: int = 0  # draft tokens of other branches, verified in this step, too
    own: OwnCounts = NO_OWN
    drafters: tuple[DrafterCounts, ...] = ()  # of a session that has had several at a time

    def after(self, known: int) -> Committed:
        """Returns the same without its first `known` tokens."""
        return self._replace(
            tokens=self.tokens[known:],
            accepted=max(0, self.accepted - known),
            verified=max(0, self.verified - known),
            logprobs=self.logprobs[known:],
            guesses=self.guesses[known:],
            own=self.own.after(known),
            drafters=tuple(one.after(known) for one in self.drafters),
        )

    @property
    def plain(self) -> bool:
        """Returns whether it tells of nothing but tokens, and of one path of drafts."""
        more = self.logprobs or self.guesses or self.prompt is not None or self.beside or self.drafters
        return not more and self.own is NO_OWN


@dataclass(frozen=True, slots=True)
class Finished:
    """The session's last token is committed; the verifier has forgotten the session."""

    session_id: bytes
    opening: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Failed:
    """The session cannot go on there; as Unavailable it may go on elsewhere."""

    session_id: bytes
    opening: int
    error: OutriderError


@dataclass(frozen=True, slots=True)
class DrafterCutOff:
    """A drafter of the session misbehaves, and may not draft there any more."""

    session_id: bytes
    opening: int
    turn: int
    reason: str


@dataclass(frozen=True, slots=True)
class VerifierEvents:
    """To a router: its hello, or what one step produced for its sessions."""

    hello: Hello | None = None
    committed: list[Committed] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    load: VerifierLoad | None = None
    cut_off: list[DrafterCutOff] = field(default_factory=list)
    dropped: Mapping[str, int] = field(default_factory=dict)  # of what drafters sent, since start, by reason


def _commands_to_wire(said: VerifierCommand) -> verifier_pb2.VerifierCommand:
    message = _command_to_wire(said)
    message.further.extend(map(_command_to_wire, said.further))
    return message


def _commands_from_wire(message: verifier_pb2.VerifierCommand) -> VerifierCommand:
    further = further_from_wire(message.further, _command_from_wire)
    return replace(_command_from_wire(message), further=further)


def _command_to_wire(said: VerifierCommand) -> verifier_pb2.VerifierCommand:
    match said.command:
        case OpenSession() as asked:
            opened = verifier_pb2.OpenSession(
                session_id=asked.session_id,
                params=params_to_wire(asked.params),
                output=asked.output,
                num_speculative_tokens=asked.num_speculative_tokens,
                draft_key=asked.draft_key,
                opening=asked.opening,
                **({} if asked.trace is None else asked.trace.fields),
            )
            return verifier_pb2.VerifierCommand(open=opened)
        case SetSpeculation() as asked:
            change = verifier_pb2.SetSpeculation(
                session_id=asked.session_id,
                opening=asked.opening,
                num_speculative_tokens=asked.num_speculative_tokens,
            )
            return verifier_pb2.VerifierCommand(speculation=change)
        case EndDrafts(session_id, opening, seat, turn):
            ended = verifier_pb2.EndDrafts(session_id=session_id, opening=opening, seat=seat, turn=turn)
            return verifier_pb2.VerifierCommand(end_drafts=ended)
        case CloseSession(session_id, opening):
            closed = verifier_pb2.CloseSession(session_id=session_id, opening=opening)
            return verifier_pb2.VerifierCommand(close=closed)
        case CancelSession(session_id):
            return verifier_pb2.VerifierCommand(cancel=verifier_pb2.CloseSession(session_id=session_id))
        case GiveBack(session_id, opening):
            given = verifier_pb2.CloseSession(session_id=session_id, opening=opening)
            return verifier_pb2.VerifierCommand(give_back=given)
    return verifier_pb2.VerifierCommand(hello=hello_to_wire(said.hello))


def _command_from_wire(message: verifier_pb2.VerifierCommand) -> VerifierCommand:
    match message.WhichOneof("command"):
        case "open":
            asked = message.open
            opened = OpenSession(
                asked.session_id,
                params_from_wire(asked.params),
                tuple(asked.output),
                asked.num_speculative_tokens,
                asked.draft_key,
                asked.opening,
                TraceContext.of(asked),
            )
            return VerifierCommand(command=opened)
        case "speculation":
            change = message.speculation
            return VerifierCommand(
                command=SetSpeculation(change.session_id, change.opening, change.num_speculative_tokens)
            )
        case "end_drafts":
            ended = message.end_drafts
            return VerifierCommand(command=EndDrafts(ended.session_id, ended.opening, ended.seat, ended.turn))
        case "close":
            return VerifierCommand(command=CloseSession(message.close.session_id, message.close.opening))
        case "cancel":
            return VerifierCommand(command=CancelSession(message.cancel.session_id))
        case "give_back":
            given = message.give_back
            return VerifierCommand(command=GiveBack(given.session_id, given.opening))
    return VerifierCommand(hello=hello_from_wire(message))


def _events_to_wire(events: VerifierEvents) -> verifier_pb2.VerifierEvents:
    message = verifier_pb2.VerifierEvents(
        hello=hello_to_wire(events.hello),
        load=None if events.load is None else verifier_load_to_wire(events.load),
        dropped=events.dropped,
        committed=[
            {  # which takes half of the time of a message that is added
                "session_id": step.session_id,
                "opening": step.opening,
                "base": step.base,
                "tokens": step.tokens,
                "accepted": step.accepted,
                "verified": step.verified,
                "cached_prompt_tokens": step.cached_prompt_tokens,
                "beside": step.beside,
            }
            for step in events.committed
        ],
    )
    for step, committed in zip(events.committed, message.committed, strict=True):
        # What most steps have nothing of costs nothing in them.
        if step.guesses:
            committed.guesses.extend(guesses_to_wire(step.guesses))
        if (own := own_to_wire(step.own)) is not None:
            committed.own.CopyFrom(own)
        if step.drafters:
            committed.drafters.extend(drafters_to_wire(step.drafters))
        if step.logprobs:
            of_tokens, top_tokens, top = numbers(step.logprobs)
            committed.logprobs.extend(of_tokens)
            committed.top_tokens.extend(top_tokens)
            committed.top_logprobs.extend(top)
        if step.prompt is not None:
            committed.prompt_logprobs.SetInParent()  # it may be empty
            committed.prompt_logprobs.CopyFrom(prompt_to_wire(step.prompt))
    for end in events.finished:
        message.finished.add(session_id=end.session_id, opening=end.opening, reason=int(end.reason))
    for failure in events.failed:
        message.failed.add(
            session_id=failure.session_id,
            opening=failure.opening,
            code=failure.error.grpc_code,
            message=failure.error.message,
        )
    for blamed in events.cut_off:
        message.cut_off.add(
            session_id=blamed.session_id, opening=blamed.opening, turn=blamed.turn, reason=blamed.reason
        )
    return message


def _check_count(message: verifier_pb2.VerifierEvents) -> None:
    """Raises TooLarge if it has more entries than any that a sound verifier says."""
    entries = len(message.committed) + len(message.finished) + len(message.failed)
    entries += len(message.cut_off) + len(message.dropped)
    if entries <= MOST_ENTRIES:
        entries += sum(
            len(step.guesses) + len(step.drafters) + (len(step.tokens) + len(step.logprobs)) // ENTRY_NUMBERS
            for step in message.committed
        )
    if entries > MOST_ENTRIES:
        raise TooLarge(f"a message has more than {MOST_ENTRIES} entries")


def _events_from_wire(message: verifier_pb2.VerifierEvents) -> VerifierEvents:
    if message.ByteSize() > ENTRY_BYTES * MOST_ENTRIES:  # most have fewer, and need not be counted
        _check_count(message)
    return VerifierEvents(
        hello_from_wire(message),
        [
            Committed(
                step.session_id,
                step.opening,
                step.base,
                step.tokens[:],
                step.accepted,
                step.verified,
                step.cached_prompt_tokens,
                from_numbers(step.logprobs, step.top_tokens, step.top_logprobs) if step.logprobs else (),
                guesses_from_wire(step.guesses) if step.guesses else (),
                prompt_from_wire(step.prompt_logprobs) if step.HasField("prompt_logprobs") else None,
                step.beside,
                own_from_wire(step.own) if step.HasField("own") else NO_OWN,
                drafters_from_wire(step.drafters) if step.drafters else (),
            )
            for step in message.committed
        ],
        [
            Finished(end.session_id, end.opening, finish_reason_from_wire(end.reason))
            for end in message.finished
        ],
        [
            Failed(one.session_id, one.opening, from_grpc_code(one.code, one.message))
            for one in message.failed
        ],
        verifier_load_from_wire(message.load) if message.HasField("load") else None,
        [DrafterCutOff(one.session_id, one.opening, one.turn, one.reason) for one in message.cut_off],
        dict(message.dropped),
    )


COMMANDS = Codec(verifier_pb2.VerifierCommand, _commands_to_wire, _commands_from_wire, MAX_BYTES)
EVENTS = Codec(verifier_pb2.VerifierEvents, _events_to_wire, _events_from_wire, MAX_BYTES)
