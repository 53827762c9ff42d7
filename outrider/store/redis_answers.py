"""What a Redis answers. It may be a proxy that does, or somebody on the way: what is no answer to what was
asked is told as if the Redis were away."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

NO_ANSWER = (ValueError, TypeError, LookupError, AttributeError, RecursionError)  # what reading it may raise


class Asked(Protocol):
    """Waits for an answer of the Redis, and what reads it. Raises Unavailable in place of Redis's own errors
    and of NO_ANSWER."""

    async def __call__(self, asked: Awaitable[T]) -> T: ...


async def read(asked: Awaitable[Any], form: Callable[[Any], T]) -> T:
    """Returns the answer as `form` reads it, which raises what it likes of NO_ANSWER."""
    return form(await asked)


def whole_bytes(answer: Any) -> bytes:
    if not isinstance(answer, bytes):
        raise TypeError(f"bytes are expected, not {type(answer).__name__}")
    return answer
