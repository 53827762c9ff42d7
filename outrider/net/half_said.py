"""How much lies here of messages that are not complete, or not taken. gRPC keeps what came of one, of each
call up to the largest, and all that was written last to each, and tells of it to nobody: a thousand half
messages without a key were gigabytes, and so were a thousand tokenizers that somebody had asked a worker for.

The system tells how much came and went by a connection, and here is counted how much of what came was whole
messages and what goes with them, and how much was written. What is left lies in this process. Where that is
too much, connections are shut: of the address that holds most, the one by which it holds most. What goes with
messages is reckoned more than it ever is; what was too much is taken back every few seconds (`settle`).
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import unquote

MOST_HELD = 128 * 2**20  # bytes, of all connections: as of HTTP's bodies that are not complete
FREE_BYTES = 2**16  # of a connection, in any case
CALL_BYTES, MESSAGE_BYTES = 2**10, 2**9  # that come with a call, and with a message to or from here
SHARE = 0.01  # of all bytes to and from here, for frames and records
SECOND_BYTES = 64  # that pings take
REMEMBERED = 2**14  # connections that have no call now

Peer = tuple[str, int]
"""Address and port."""


class Held(NamedTuple):
    """A connection, and how much lies here of messages that came or go by it."""

    descriptor: int
    address: str
    bytes: float


@dataclass(slots=True)
class Said:
    """What came by one connection and is known to be complete, and what was written to it."""

    began: float
    calls: int = 0
    explained: float = 0.0  # bytes
    written: int = 0  # bytes
    idle: float = 0.0  # what was unexplained when it had no call last: gRPC keeps nothing then

    def message(self, size: int) -> None:
        """A message came of so many bytes."""
        self.explained += MESSAGE_BYTES + size

    def held(self, received: int, sent: int, now: float) -> float:
        """Returns the bytes of messages that are not complete, or not taken, where so many came and were
        sent."""
        unexplained = self._unexplained(self.explained, received, sent, now) - FREE_BYTES
        if not self.calls:
            self.idle = max(unexplained, 0.0)
        return max(unexplained - self.idle, 0.0) + max(self.written - sent, 0)

    def settle(self, explained: float, received: int, sent: int, now: float) -> None:
        """Takes back what the frames of messages did not need of what is allowed for them: it would be room
        for half ones later. `explained`: as it was, so that it had come when so much was `received`."""
        self.explained += min(self._unexplained(explained, received, sent, now), 0.0)

    def _unexplained(self, explained: float, received: int, sent: int, now: float) -> float:
        return received - explained - SHARE * (received + sent) - SECOND_BYTES * (now - self.began)


class Halves:
    """All connections by which calls came. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[Peer, Said] = {}
        self._idle: OrderedDict[Peer, Said] = OrderedDict()

    @contextmanager
    def call(self, peer: str) -> Iterator[Said]:
        """While a call's messages are read; `peer` is gRPC's name of the connection."""
        name = peer_of(peer)
        said = self._open.get(name) or self._idle.pop(name, None) or Said(self._clock())
        self._open[name] = said
        said.calls += 1
        said.explained += CALL_BYTES
        try:
            yield said
        finally:
            said.calls -= 1
            if not said.calls and self._open.get(name) is said:
                del self._open[name]
                self._idle[name] = said
                if len(self._idle) > REMEMBERED:
                    self._idle.popitem(last=False)

    def wrote(self, name: Peer, size: int) -> None:
        """A message of so many bytes was written to a connection, whose other end may answer by pings and
        windows."""
        said = self._open.get(name) or self._idle.get(name)
        if said is not None:
            said.explained += MESSAGE_BYTES
            said.written += size

    def explained(self) -> dict[Peer, float]:
        """Returns of each connection the bytes that are known to be of whole messages."""
        return {name: said.explained for name, said in (*self._idle.items(), *self._open.items())}

    def settle(self, explained: Mapping[Peer, float], moved: Mapping[Peer, tuple[int, int]]) -> None:
        """Settles connections by what was `explained` before it was seen how many bytes had `moved` by each:
        received, sent. Forgets those that are no more: another may get their name."""
        for name, before in explained.items():
            if name not in moved:
                self._idle.pop(name, None)
            elif (said := self._open.get(name) or self._idle.get(name)) is not None:
                said.settle(before, *moved[name], self._clock())

    def held(self, name: Peer, received: int, sent: int) -> float:
        """Returns the bytes that lie here of a connection's messages. One that is not known has said nothing
        but unfinished ones."""
        said = self._open.get(name) or self._idle.get(name)
        if said is None:
            return max(received - FREE_BYTES, 0.0)
        return said.held(received, sent, self._clock())


HALVES = Halves()  # of this process, in which no two connections have one name


def peer_of(name: str) -> Peer:
    """Returns the address and port in gRPC's name of a connection, such as "ipv6:%5B::1%5D:50051"."""
    address, _, port = unquote(name).partition(":")[2].rpartition(":")
    return address.strip("[]"), int(port) if port.isdecimal() else 0


def too_much(connections: Iterable[Held], most: float) -> list[Held]:
    """Returns those to shut, so that those that are left hold `most` together. Pure."""
    of: dict[str, list[Held]] = defaultdict(list)
    for one in connections:
        of[one.address].append(one)
    for theirs in of.values():
        theirs.sort(key=lambda one: one.bytes)
    sums = {address: sum(one.bytes for one in theirs) for address, theirs in of.items()}
    total, shut = sum(sums.values()), list[Held]()
    while total > most:
        address = max(sums, key=sums.__getitem__)
        one = of[address].pop()
        shut.append(one)
        sums[address] -= one.bytes
        total -= one.bytes
        if not of[address]:
            del sums[address]
    return shut
