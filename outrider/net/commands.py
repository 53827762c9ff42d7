"""A router's commands on their way to a worker: what waits is written together, and obeyed one by one.

gRPC writes a message of a stream a turn of the event loop. A router with much to do has long turns, and if
each command were a message, what it has to tell would grow faster than it is told.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TypeVar

from outrider.net.outbox import Outbox
from outrider.wire.codec import MOST_FURTHER
from outrider.wire.drafter_sessions import DrafterCommand, OpenDraft
from outrider.wire.verifier_sessions import OpenSession, VerifierCommand

LEAST_BULK = 64  # of each
MOST_BULK = MOST_FURTHER * LEAST_BULK  # of those that are written together, but for the last one


C = TypeVar("C", VerifierCommand, DrafterCommand)


async def together(outbox: Outbox[C]) -> AsyncIterator[C]:
    """Yields what is put there, of which one may carry others that came after it. A hello is alone."""
    async for batch in outbox.batches(MOST_BULK, _bulk):
        yield replace(batch[0], further=tuple(batch[1:])) if len(batch) > 1 else batch[0]


async def one_by_one(commands: AsyncIterator[C]) -> AsyncIterator[C]:
    async for command in commands:
        yield command
        for each in command.further:
            yield each


def _bulk(said: VerifierCommand | DrafterCommand) -> int:
    if said.hello is not None:
        return MOST_BULK
    asked = said.command
    if isinstance(asked, OpenSession | OpenDraft):
        return LEAST_BULK + asked.params.bulk + 4 * len(asked.output)
    return LEAST_BULK
