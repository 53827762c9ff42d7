"""What routers and workers share: who is there, and the logs of sessions.

Two protocols, because a worker needs less than a router. Implementations: `memory.MemoryStore` in one
process, `redis.RedisStore` for several routers, and `registration.RouterRegistrar`, which is a router's store
as its workers reach it.

All methods raise Unavailable where the store cannot be reached at the moment; the caller goes on with what it
knows and tries again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from outrider.errors import IdInUse
from outrider.store.logs import SessionLogs
from outrider.wire.description import WorkerRecord as WorkerRecord
from outrider.wire.hello import Identity, WorkerKey
from outrider.wire.registry import Answer as Answer

TTL_SECONDS = 4.0  # a record outlives the last beat by this much; with the time to notice it stays under 5 s
WORD_SECONDS = 30.0  # a router's word to a worker is forgotten when it has not been said again for so long


class Registrar(Protocol):
    """All that a worker needs.

    A live record belongs to the caller that made it: another one is refused with IdInUse. `caller` names the
    certificate that was shown; it is empty if none was. So a worker that is started anew is let in at once,
    and one that holds a certificate of its own cannot be pushed out.
    """

    async def beat(self, record: WorkerRecord, caller: str = "") -> Answer:
        """Renews the worker's record for TTL_SECONDS.

        A record with another incarnation replaces the former one and forgets the answers to it.
        """
        ...

    async def leave(self, identity: Identity, caller: str = "") -> None:
        """Removes the record at once, unless it belongs to another incarnation."""
        ...

    async def close(self) -> None:
        """Closes connections. Records stay until they expire."""
        ...


class Store(Registrar, Protocol):
    """What a router needs."""

    @property
    def logs(self) -> SessionLogs:
        """The logs of sessions."""
        ...

    def workers(self) -> AsyncIterator[Mapping[WorkerKey, WorkerRecord]]:
        """Yields all live records by role and id, in the order in which they came or changed: now, and when
        a worker came, went or changed.

        A load alone is no change, and may be as old as the worker's last one. Changes that come faster than
        the reader takes them are joined. While the store cannot be reached nothing is yielded, and the last
        records stay good; after the store's return each has TTL_SECONDS in which to be renewed. It raises
        nothing and waits for the store.
        """
        ...

    async def answer(
        self, identity: Identity, router_id: str, refusal: str | None, trouble: str | None = None
    ) -> None:
        """Sets a router's word to a worker, in place of its former one. Without either sentence the worker is
        taken in.

        The word is forgotten after WORD_SECONDS, since the router may be gone. It is ignored if that
        incarnation has no live record.
        """
        ...


Word = tuple[str | None, str | None]
"""A router's word to a worker: (refusal, trouble)."""


def answer_of(words: Mapping[str, Word]) -> Answer:
    """Returns what a worker is told, from each router's last word. Of several complaints the first by id
    counts."""
    by_id = sorted(words.items())
    return Answer(
        taken_in_by=tuple(router_id for router_id, word in by_id if word == (None, None)),
        refusal=next((refusal for _, (refusal, _) in by_id if refusal), None),
        trouble=next((trouble for _, (_, trouble) in by_id if trouble), None),
    )


def id_in_use(identity: Identity) -> IdInUse:
    """Returns the refusal of a caller that speaks for a worker that another one has registered."""
    return IdInUse(
        f"the {identity.role.name.lower()} {identity.worker_id} is registered with another certificate: take "
        f"another id, or wait {TTL_SECONDS:g} seconds after its end"
    )


def twice(identity: Identity) -> IdInUse:
    """Returns the refusal of one of two processes that live and have one id, as copies of one image may: else
    they would take it from one another without end, and the sessions with it."""
    return IdInUse(
        f"another process has the id of this {identity.role.name.lower()}, {identity.worker_id}, and lives: "
        "start this one anew, so that it draws its own"
    )


def gives_way(record: WorkerRecord, live: WorkerRecord) -> bool:
    """Returns whether a process is refused for the one that is registered with its id. Of two the one with
    the greater incarnation stays, whoever comes first; one and the same does not move."""
    own, other = record.info.identity.incarnation, live.info.identity.incarnation
    return own < other or (own == other and record.address != live.address)


def changed(before: Mapping[WorkerKey, WorkerRecord], after: Mapping[WorkerKey, WorkerRecord]) -> bool:
    """True if there is anything to tell beyond loads."""
    return before.keys() != after.keys() or any(
        (one.info, one.address) != (after[key].info, after[key].address) for key, one in before.items()
    )
