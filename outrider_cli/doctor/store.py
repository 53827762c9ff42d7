"""Whether the Redis of --store will do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from outrider.errors import OutriderError
from outrider.options.memory import memory_text
from outrider.store.logs import MAX_BYTES
from outrider.store.redis_health import RedisHealth, ask_health
from outrider.store.url import parse_store_url
from outrider_cli.doctor.clock import clock_against
from outrider_cli.doctor.finding import Finding

OLDEST = (6, 2)
ROOM = 1.25  # times the bytes of all logs: a Redis needs some for itself
SLOW_SECONDS = 0.05  # of a round trip


def store(url: str, unix_time: Callable[[], float]) -> list[Finding]:
    """Asks it. `unix_time` gives seconds."""
    try:
        health = asyncio.run(ask_health(parse_store_url(url), unix_time))
    except OutriderError as error:
        return [Finding("store", error.message, "look whether it runs, and whether this machine reaches it")]
    wrong = list(_wrong(health))
    if not wrong:
        version = ".".join(map(str, health.version))
        room = memory_text(health.most_bytes) if health.most_bytes else "no limit"
        said = f"Redis {version}, {1000 * health.round_trip:.1f} ms away, {room} of memory, {health.policy}"
        wrong = [Finding("store", said)]
    return [*wrong, clock_against("the store's", health.here, health.there, health.round_trip)]


def _wrong(health: RedisHealth) -> Iterator[Finding]:
    def found(said: str, todo: str) -> Finding:
        return Finding("store", said, todo)

    if health.version < OLDEST:
        told = ".".join(map(str, health.version))
        yield found(f"it is a Redis {told}", f"take {'.'.join(map(str, OLDEST))} or newer")
    if health.mode == "cluster":
        yield found("it is a Redis Cluster", "take a Redis alone, or one with replicas")
    if health.role == "slave":
        yield found("it is a replica, which takes no writes", "give the address of the Redis that it follows")
    if health.policy.startswith("allkeys"):
        yield found(
            f"maxmemory-policy is {health.policy}: it may forget registrations, and what others keep there",
            "CONFIG SET maxmemory-policy volatile-lru",
        )
    elif health.most_bytes and health.policy == "noeviction":
        yield found(
            "maxmemory-policy is noeviction: when it is full it refuses registrations, too",
            "CONFIG SET maxmemory-policy volatile-lru",
        )
    if 0 < health.most_bytes < ROOM * MAX_BYTES:
        least = memory_text(int(ROOM * MAX_BYTES))
        yield found(
            f"maxmemory is {memory_text(health.most_bytes)}, less than sessions' logs may take",
            f"give it {least} or more",
        )
    if health.evicted:
        yield found(
            f"it has thrown keys away for want of room: {health.evicted}",
            "give it more maxmemory, or a Redis of its own: those sessions cannot be resumed",
        )
    if health.round_trip > SLOW_SECONDS:
        yield found(
            f"a round trip takes {1000 * health.round_trip:.0f} ms", "take one that is nearer or less busy"
        )
