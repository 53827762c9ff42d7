"""How much a host may register: the rate of its words, how many workers, and how often they come anew. Pure:
times are seconds on the caller's clock.

A host is what comes from one address with one certificate, so that pods that share a certificate do not share
a limit.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.errors import Overloaded
from outrider.net.token_bucket import TokenBucket
from outrider.store.store import TTL_SECONDS
from outrider.wire.hello import WorkerKey

MOST_WORKERS = 256  # of one host
WORD_BYTES = 4096  # what a word costs beside its bytes
BYTES_PER_SECOND = 2 * 2**20  # a word a second of each of so many workers, twice over
BURST_BYTES = 8 * 2**20  # they all start at once
JOINS_PER_SECOND = (
    2.0  # once all of them have come: the router connects to each that is new, or not as it was
)
REMEMBERED = 1024  # hosts


@dataclass(slots=True)
class _Host:
    bucket: TokenBucket = field(default_factory=lambda: TokenBucket(BYTES_PER_SECOND, BURST_BYTES))
    joins: TokenBucket = field(default_factory=lambda: TokenBucket(JOINS_PER_SECOND, MOST_WORKERS))
    seen: OrderedDict[WorkerKey, _Seen] = field(default_factory=OrderedDict)  # the last at the end


class _Seen(NamedTuple):
    at: float  # seconds
    description: int  # hash of what the worker said it is


class RegistrationLimits:
    def __init__(self) -> None:
        self._hosts: OrderedDict[str, _Host] = OrderedDict()  # the last to say something at the end

    def word(self, name: str, size: int, now: float) -> None:
        """Counts a word of so many bytes. Raises Overloaded if the host says too much; it may again once its
        allowance has come back."""
        bucket, units = self._host(name).bucket, WORD_BYTES + size
        wait = bucket.spend(units, now)
        if wait > 0:
            bucket.spend(-units, now)  # it is not owed: else a moment of it would keep all out for long
            raise Overloaded(
                "too much is registered from this address: a worker says a word a second",
                retry_after=round(wait) + 1,
            )

    def worker(self, name: str, key: WorkerKey, description: int, now: float) -> None:
        """Counts a live worker of the host. `description`: a hash of all that it says but its load. Raises
        Overloaded if it has too many, or if they come anew too often."""
        host = self._host(name)
        seen = host.seen
        while seen and next(iter(seen.values())).at <= now - TTL_SECONDS:
            seen.popitem(last=False)
        known = seen.get(key)
        if known is None and len(seen) >= MOST_WORKERS:
            raise Overloaded(f"{MOST_WORKERS} workers are registered from this address, the most from one")
        if known is None or known.description != description:
            if host.joins.spend(0, now) > 0:
                raise Overloaded("workers of this address come anew too often; this one is taken in later")
            host.joins.spend(1, now)
        seen[key] = _Seen(now, description)
        seen.move_to_end(key)

    def left(self, name: str, key: WorkerKey) -> None:
        self._host(name).seen.pop(key, None)

    def _host(self, name: str) -> _Host:
        host = self._hosts.setdefault(name, _Host())
        self._hosts.move_to_end(name)
        if len(self._hosts) > REMEMBERED:
            self._hosts.popitem(last=False)
        return host
