"""How long a client waits for its answer, as it says so: in HTTP headers, or as the deadline of a gRPC call.

All times are on the event loop's clock.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc.aio

from outrider.errors import InvalidRequest

TIMEOUT = "x-request-timeout"  # seconds, of the whole answer
SDK_TIMEOUTS = ("x-stainless-timeout", "x-stainless-read-timeout")
"""What OpenAI's SDKs send: seconds until an answer has begun. One that is not streamed begins at its end."""
SDK_GRACE_SECONDS = 1.0
"""The SDK itself tells its user that the time is over. An answer of ours before that would be another error,
and one that it asks for again; ours is for the case that a proxy hides that the client has gone."""

MOST_CHARACTERS = 64  # of a number: one of 60 KB took the event loop 9 ms


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Each None = none."""

    first_token_by: float | None = None
    deadline: float | None = None


def time_limits(headers: Mapping[str, str], streamed: bool, now: float) -> TimeLimits:
    """Returns the limits that the headers set. Raises InvalidRequest for a bad x-request-timeout; what an SDK
    sends by itself is never refused."""
    given = headers.get(TIMEOUT)
    whole = math.inf if given is None else _seconds(given)
    if not whole > 0:
        raise InvalidRequest(f"{TIMEOUT} must be a number of seconds above 0, not {given!r}", field=TIMEOUT)
    sdk = [_seconds(headers[name]) for name in SDK_TIMEOUTS if name in headers and not streamed]
    gone = min((seconds for seconds in sdk if seconds > 0), default=math.inf) + SDK_GRACE_SECONDS
    return TimeLimits(_after(now, whole), _after(now, min(whole, gone)))


def call_limits(context: grpc.aio.ServicerContext[Any, Any]) -> TimeLimits:
    """Returns the limits that a gRPC call's deadline sets."""
    left = context.time_remaining()
    if left is None:
        return TimeLimits()
    at = asyncio.get_running_loop().time() + left
    return TimeLimits(at, at)


def _after(now: float, seconds: float) -> float | None:
    return now + seconds if seconds < math.inf else None


def _seconds(text: str) -> float:
    """Returns the number of seconds, or NaN if it is no number."""
    if len(text) > MOST_CHARACTERS:
        return math.nan
    try:
        return float(text)
    except ValueError:
        return math.nan
