"""The stream that a drafter has opened to the router by itself. On it they say what they say on one that the
router opens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc.aio

from outrider.net.allowance import Allowance
from outrider.net.conversation import converse
from outrider.net.tasks import cancel
from outrider.wire.drafter_sessions import DrafterCommand, DrafterEvents
from outrider.wire.methods import JOIN, Method


class JoinedStream:
    """Stands where a worker's call would: `begin` once, then `cancel`."""

    def __init__(self, messages: AsyncIterator[bytes], shared: Allowance) -> None:
        """`messages`: what the drafter says, after what it is. `shared`: what all with its token may say."""
        self._messages = messages
        self._shared = shared
        self._cancelled = asyncio.Event()
        self.commands: AsyncIterator[DrafterCommand]  # to be written

    def begin(self, commands: AsyncIterator[Any], allowance: Allowance) -> AsyncGenerator[Any, None]:
        """Returns what the drafter says. Raises as `Conversation.heard` does, and CancelledError once it is
        cancelled."""
        self.commands = commands
        return self._heard(allowance)

    def cancel(self) -> None:
        """Ends what is heard."""
        self._cancelled.set()

    async def _heard(self, allowance: Allowance) -> AsyncGenerator[DrafterEvents, None]:
        over, tasks = asyncio.create_task(self._cancelled.wait()), []
        try:
            while True:
                reading = asyncio.ensure_future(anext(self._messages, None))
                tasks = [over, reading]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if over.done():
                    raise asyncio.CancelledError
                if (raw := reading.result()) is None:
                    return
                for each in (self._shared, allowance):
                    each.message(len(raw))
                yield JOIN.asked.from_bytes(raw)
        finally:
            await cancel([over, *tasks])


Connection = grpc.aio.Channel | JoinedStream
"""A connection to a worker: one to call it by, or the stream that it has opened."""


def conversation(
    connection: Connection,
    method: Method[Any, Any],
    commands: AsyncIterator[Any],
    allowance: Allowance,
) -> tuple[Any, AsyncGenerator[Any, None]]:
    """Returns the call on which a router says its commands to a worker, and what it hears there. `allowance`:
    what the worker may say."""
    if isinstance(connection, JoinedStream):
        return connection, connection.begin(commands, allowance)
    call = converse(connection, method, commands)
    return call, call.heard(allowance)
