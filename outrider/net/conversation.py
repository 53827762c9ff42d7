"""A call with a stream of messages both ways, from the side that opens it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from outrider.net.allowance import Allowance
from outrider.wire.methods import Method

LOOK_SECONDS = 0.005
LOOKS = 200  # for the server's status: a second, since the connection may have broken in that moment

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")


class Conversation(Generic[Asked, Answered]):
    """Says how the call ended as its server said it. gRPC puts an INTERNAL of its own in the place of the
    server's status if a write finds the call over, before or after that status has come (grpc/grpc#36066)."""

    def __init__(
        self, call: grpc.aio.StreamStreamCall[Asked, bytes], method: Method[Asked, Answered]
    ) -> None:
        self._call = call
        self._from_bytes = method.answered.from_bytes
        self._told: grpc.aio.AioRpcError | None = None  # the server's word, if it has come
        call.add_done_callback(self._over)

    def _over(self, _: object) -> None:
        self._look()

    def _look(self) -> grpc.aio.AioRpcError:
        """Returns how a call that is over ended: the server's word, if it has come."""
        if self._told is None or _is_own(self._told):
            code, details = _now(self._call.code()), _now(self._call.details()) or ""
            empty = grpc.aio.Metadata()
            self._told = grpc.aio.AioRpcError(code, empty, empty, details, None)
        return self._told

    async def write(self, message: Asked) -> None:
        """Raises AioRpcError if the call is over, of code OK if it ended well."""
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise await self.end() from None

    async def heard(self, allowance: Allowance | None = None) -> AsyncGenerator[Answered, None]:
        """Yields what the other side says. Raises InvalidRequest if the bytes are no message, and CutOff if
        they are more than the allowance of a peer that is not trusted."""
        try:
            async for raw in self._call:
                if allowance is not None:
                    allowance.message(len(raw))
                yield self._from_bytes(raw)
        except grpc.aio.AioRpcError:
            if (end := await self.end()).code() is not grpc.StatusCode.OK:
                raise end from None

    async def end(self) -> grpc.aio.AioRpcError:
        """Returns how the call ended, once it has."""
        await self._call.code()
        told = self._look()
        for _ in range(LOOKS):  # gRPC tells nobody when it sets the server's status after its own
            if not _is_own(told):
                break
            await asyncio.sleep(LOOK_SECONDS)
            told = self._look()
        return told

    def cancel(self) -> None:
        self._call.cancel()


def _is_own(status: grpc.aio.AioRpcError) -> bool:
    """Returns whether gRPC set this status by itself, since a call ended while it was written to."""
    return (status.code(), status.details()) == (grpc.StatusCode.INTERNAL, "Internal error from Core")


def _now(status: Coroutine[Any, Any, Any]) -> Any:
    """Returns what a coroutine of a call that is over returns."""
    try:
        status.send(None)
    except StopIteration as returned:
        return returned.value
    raise AssertionError("the call is over")


def converse(
    connection: grpc.aio.Channel,
    method: Method[Asked, Answered],
    messages: AsyncIterator[Asked] | None = None,
    token: str | None = None,
) -> Conversation[Asked, Answered]:
    """Begins a call with a stream of messages both ways; without `messages` they are written to the call.
    `token`: to be shown."""
    call = connection.stream_stream(method.path, method.asked.to_bytes, None)
    shown = None if token is None else (("authorization", f"Bearer {token}"),)
    return Conversation(call(messages, metadata=shown), method)
