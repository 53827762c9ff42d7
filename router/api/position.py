"""Where a client is in an answer: the ids of server-sent events, and what a request that resumes one says.

A position has one number for each answer to the request, `n` to a prompt: the output tokens that the client
has, and one more once it has been told how that answer ends.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import aclosing

from outrider.errors import InvalidRequest
from outrider.wire.session import SESSION_ID_BYTES, SessionId
from router.requests import Events, GenerationRequest, SessionBegun, SessionEvent, TokensCommitted

Position = tuple[int, ...]

ID = re.compile(rf"(?:cmpl-|chatcmpl-|msg_|resp_)?([0-9a-f]{{{2 * SESSION_ID_BYTES}}})")
POSITION = re.compile(r"[0-9]{1,9}(,[0-9]{1,9})*")


def event_id(session_id: SessionId, position: Sequence[int]) -> str:
    return f"{session_id.hex()}:{','.join(map(str, position))}"


def parse_event_id(text: str) -> tuple[SessionId, Position]:
    """Raises InvalidRequest that says the form."""
    identity, separator, position = text.partition(":")
    if not (separator and ID.fullmatch(identity) and POSITION.fullmatch(position)):
        raise InvalidRequest(
            "Last-Event-ID must be the id of an event of this server: 32 hexadecimal digits, a colon and the "
            "position, as in 0123456789abcdef0123456789abcdef:17",
            field="Last-Event-ID",
        )
    return parse_id(identity), parse_position(position)


def parse_id(text: str) -> SessionId:
    """Returns the session of a response's id. Raises InvalidRequest."""
    found = ID.fullmatch(text)
    if found is None:
        raise InvalidRequest(
            "id must be that of an answer: 32 hexadecimal digits, with or without what stands before them",
            field="id",
        )
    return SessionId(bytes.fromhex(found[1]))


def parse_position(text: str) -> Position:
    """Raises InvalidRequest that says the form."""
    if not POSITION.fullmatch(text):
        raise InvalidRequest(
            "after must be a number of output tokens, or with several answers one for each, as in 17,9",
            field="after",
        )
    return tuple(map(int, text.split(",")))


def check(position: Position, sessions: Sequence[GenerationRequest]) -> None:
    """Raises InvalidRequest if no client of these sessions can be there."""
    if len(position) != len(sessions):
        raise InvalidRequest(
            f"after must have {len(sessions)} numbers, one for each answer to the request; "
            f"it has {len(position)}",
            field="after",
        )
    for count, session in zip(position, sessions, strict=True):
        if count > session.params.max_tokens + 1:
            raise InvalidRequest(
                f"after must be at most {session.params.max_tokens + 1} here, not {count}: the request has a "
                f"max_tokens of {session.params.max_tokens}, and the end counts as one",
                field="after",
            )


def companion(first: SessionId, index: int) -> SessionId:
    """Returns the session of a request's answer at `index`, from that of its answer 0: only that one's id is
    told."""
    if index == 0:
        return first
    return SessionId(hashlib.sha256(first + index.to_bytes(4)).digest()[:SESSION_ID_BYTES])


async def cut(events: Events, at: Collection[int]) -> AsyncGenerator[SessionEvent, None]:
    """The events of a session, whose steps are cut where its client is, or may be: a step of a session that
    goes on elsewhere may hold tokens that the client has, and others."""
    before = 0

    def parts(step: TokensCommitted) -> Iterator[TokensCommitted]:
        nonlocal before
        start, before = before, before + len(step.tokens)
        for place in sorted(place for place in at if start < place < before):
            has, start = place - start, place
            yield step._replace(tokens=step.tokens[:has], logprobs=step.logprobs[:has])
            rest, logprobs = step.tokens[has:], step.logprobs[has:]
            step = step._replace(
                tokens=rest, accepted=0, verified=0, numerics="", logprobs=logprobs, guesses=()
            )
        yield step

    async with aclosing(events):
        async for event in events:
            if isinstance(event, SessionBegun):
                yield SessionBegun((part for step in event.known for part in parts(step)), event.over)
            elif isinstance(event, TokensCommitted):
                for part in parts(event):
                    yield part
            else:
                yield event
