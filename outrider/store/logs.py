"""The logs of sessions, as routers share them: append-only records, each log with one owner.

A log is a help, not the truth. Tokens are a function of the request, so what a log lacks is computed again.
What it has is never wrong: only its owner appends, and only at its end. A router that takes a log over
becomes its owner; the former owner learns of it with its next append.

A store keeps MAX_BYTES of logs. If there are more, a log of the tenant that has most goes, the one written to
longest ago: who has less than an even share loses nothing, whatever the others do.

Implementations: `memory_logs.MemorySessionLogs` in one process, `redis_logs.RedisSessionLogs` for several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from outrider.options.sessions import SessionOptions
from outrider.wire.session import SessionId

MAX_BYTES = 256 * 2**20  # of all logs, with what a store needs for them
SESSION_TTL_SECONDS = SessionOptions().session_ttl  # a log outlives what was written to it last by so much


@dataclass(frozen=True, slots=True)
class Owner:
    """A router that may append to a log. If there are two, the one with the larger generation may, even if a
    store lost its memory and the other wrote first."""

    name: str  # of a router's incarnation
    generation: int = 0  # 0 = it began the log; every take is one more

    def prevails_over(self, other: Owner) -> bool:
        """Returns whether this one may append to a log where the store has that owner."""
        return self == other or self.generation > other.generation


class Append(NamedTuple):
    """Records for the end of one log. Records that the log has already are skipped: an answer may have
    been lost. Without records it asks whether the log is as long as that."""

    session_id: SessionId
    owner: Owner
    base: int  # records before these; with 0 a log begins
    records: Sequence[bytes]  # at least one where a log begins
    tenant: str = ""  # whose log it is if it begins: name of the API key; empty = keys are not asked for


@dataclass(frozen=True, slots=True)
class Claim:
    """Whose a log is, and whether its session was cancelled by a router that does not own it."""

    owner: Owner
    cancelled: bool


class Lead(NamedTuple):
    """The first log of an answer, as an owner took it. Who took it last may take the answer's others."""

    session_id: SessionId
    owner: Owner


@dataclass(frozen=True, slots=True)
class Taken:
    """A log, told by its new owner."""

    owner: Owner
    length: int  # in records
    content: bytes  # the records one after the other


class SessionLogs(Protocol):
    """All methods raise Unavailable if the store cannot be reached, or refuses. An append may then have been
    made, or a part of it, or not."""

    async def append(self, appends: Sequence[Append], ttl_seconds: float) -> list[int | None]:
        """Returns each log's length after its append, in records; None if the log belongs to another owner.

        Without appends it is a probe, which writes next to nothing. The logs live `ttl_seconds` from now on.
        A length below an append's `base` means that nothing was appended: the log has lost what came before
        (0: all of it) and must be written from there.
        """
        ...

    async def take(
        self, session_id: SessionId, name: str, ttl_seconds: float, lead: Lead | None = None
    ) -> Taken | None:
        """Makes `name` the owner of the log, as the next generation. Returns the whole log, or None if
        there is none. Raises Superseded if another has taken the log of `lead` since; None = nobody leads."""
        ...

    async def read(self, session_id: SessionId) -> bytes | None:
        """Returns the log's first record, or None if there is no such log."""
        ...

    async def cancel(self, session_id: SessionId) -> None:
        """Notes that the session is cancelled, if it has a log."""
        ...

    async def claim(self, session_id: SessionId) -> Claim | None:
        """Returns whose the log is, or None if there is no such log."""
        ...

    async def last(self, session_id: SessionId) -> bytes | None:
        """Returns the log's last record, or None if there is no such log."""
        ...
