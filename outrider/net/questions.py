"""The first message of a gRPC call: it comes in time, or the call ends. Otherwise each call that says nothing
would hold its memory for as long as its caller likes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from google.protobuf.message import DecodeError

from outrider.errors import InvalidRequest, TooSlow
from outrider.net.half_said import HALVES
from outrider.net.places import Places, host_of

QUESTION_SECONDS = 10.0  # in which it comes
STANDARD = ("/grpc.health.", "/grpc.reflection.")  # whose messages hold a name, which is kept and told again
STANDARD_BYTES = 4096  # of such a message, from anybody
MOST_UNASKED, SHARE = 2**14, 2  # calls of a server that wait for theirs, of which one address has half


def places() -> Places:
    """Returns those of a server's calls that wait for their first message."""
    return Places(MOST_UNASKED, SHARE, "too many calls wait for what they ask")


def received(raws: AsyncIterable[bytes]) -> aclosing[Any]:
    """Returns a call's messages. gRPC's own iterator holds the last one until it is closed."""
    return aclosing(aiter(raws))


def asked(
    method: str,
    behaviour: Callable[..., Any],
    deserializer: Callable[[bytes], Any] | None,
    streaming: bool,
    generates: bool,
    unasked: Places,
) -> Callable[..., Any]:
    """Returns the behaviour for a stream of bytes; where it generates, what returns its generator. It raises
    InvalidRequest if they are no message; if the messages are a stream, that stream raises it. TooSlow and
    Overloaded come in the same way."""

    standard = method.startswith(STANDARD)

    def decoded(raw: bytes) -> Any:
        if deserializer is None:
            return raw
        if standard and len(raw) > STANDARD_BYTES:
            raise InvalidRequest(f"a message has {len(raw)} bytes here, and may have {STANDARD_BYTES}")
        try:
            return deserializer(raw)
        except DecodeError:
            raise InvalidRequest(
                "the bytes are no message of this method; compressed ones are not taken"
            ) from None

    async def first(raws: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Yields the first message, if there is one."""
        with unasked.taken(host_of(context.peer())):
            try:
                async with asyncio.timeout(QUESTION_SECONDS):
                    raw = await anext(aiter(raws), None)
            except TimeoutError:
                raise TooSlow(f"nothing was asked in {QUESTION_SECONDS:g} s") from None
        if raw is not None:
            yield raw

    async def messages(raws: AsyncIterable[bytes], context: Any) -> AsyncIterator[Any]:
        with HALVES.call(context.peer()) as said:
            async with received(raws) as receiving:
                async for raw in first(receiving, context):
                    said.message(len(raw))
                    yield decoded(raw)
                async for raw in receiving:
                    said.message(len(raw))
                    yield decoded(raw)

    async def question(raws: AsyncIterable[bytes], context: Any) -> Any:
        with HALVES.call(context.peer()) as said:
            async with received(raws) as receiving:
                async for raw in first(receiving, context):
                    said.message(len(raw))
                    return decoded(raw)
        raise InvalidRequest("the call ended before its message")

    async def answer(raws: AsyncIterable[bytes], context: Any) -> Any:
        found = behaviour(messages(raws, context) if streaming else await question(raws, context), context)
        return found if generates else await found

    return answer
