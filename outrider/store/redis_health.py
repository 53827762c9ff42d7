"""What a Redis says of itself, for who wants to know whether it will do as a store."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from outrider.store.redis import RedisStore
from outrider.store.url import StoreUrl


@dataclass(frozen=True, slots=True)
class RedisHealth:
    """What a Redis says of itself now."""

    version: tuple[int, ...]
    mode: str  # standalone, sentinel or cluster
    role: str  # master or slave
    most_bytes: int  # that it may hold; 0 = no limit
    policy: str  # what it does when it holds so many
    evicted: int  # keys, since its start, for want of room
    here: float  # unix seconds by the clock here
    there: float  # and by its own, at the same moment but for half a round trip
    round_trip: float  # seconds


async def ask_health(
    url: StoreUrl, unix_time: Callable[[], float], clock: Callable[[], float] = time.perf_counter
) -> RedisHealth:
    """Asks a Redis. Both clocks give seconds. Raises StartupError if it refuses, Unavailable if it is
    away."""
    store = RedisStore(url)
    try:
        info = await store.ask("INFO")
        begun = clock()
        seconds, microseconds = await store.ask("TIME")
        taken = clock() - begun
        here = unix_time() - taken / 2
    finally:
        await store.close()
    return RedisHealth(
        version=tuple(int(part) for part in str(info["redis_version"]).split(".") if part.isdecimal()),
        mode=str(info.get("redis_mode", "standalone")),
        role=str(info.get("role", "master")),
        most_bytes=int(info.get("maxmemory", 0)),
        policy=str(info.get("maxmemory_policy", "noeviction")),
        evicted=int(info.get("evicted_keys", 0)),
        here=here,
        there=int(seconds) + int(microseconds) / 1e6,
        round_trip=taken,
    )
