"""A router's commands on their way to a worker: what waits is written together, and obeyed one by one.

gRPC writes a message of a stream a turn of the event loop. A router with much to do has long turns, and if
each command were a message, what it has to tell would grow faster than it is told.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol, Self, TypeVar

from outrider.net.outbox import Outbox
from outrider.wire.hello import Hello

MOST_BULK = 16 * 1024  # of those that are written together, and the last one
LEAST_BULK = 64  # of each


class Command(Protocol):
    @property
    def hello(self) -> Hello | None: ...

    @property
    def bulk(self) -> int: ...

    @property
    def further(self) -> Sequence[Self]: ...

    def then(self, further: Sequence[Self]) -> Self: ...


C = TypeVar("C", bound=Command)


async def together(outbox: Outbox[C]) -> AsyncIterator[C]:
    """Yields what is put there, of which one may carry others that came after it. A hello is alone."""
    async for first, *further in outbox.batches(MOST_BULK, _bulk):
        yield first.then(further) if further else first


async def one_by_one(commands: AsyncIterator[C]) -> AsyncIterator[C]:
    async for command in commands:
        yield command
        for each in command.further:
            yield each


def _bulk(command: Command) -> int:
    return MOST_BULK if command.hello is not None else LEAST_BULK + command.bulk
