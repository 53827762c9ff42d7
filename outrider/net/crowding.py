"""Who crowds a gRPC server. gRPC is told how many connections there may be, and refuses more whoever has the
others. So before that some are shut: of the address that has most, those that have said least. And some are
where unfinished messages take too much memory (half_said.py).

gRPC tells of no connection before its first call. The system does: the descriptors of this process, and how
much came by each. Where it does not, gRPC's limit is all there is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

from outrider.net.freed_memory import FreedMemory, give_back
from outrider.net.half_said import HALVES, MOST_HELD, Held, Peer, too_much

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
SETTLED_LOOKS = 60  # from one to the next at which all connections are settled: 8,192 take .15 s, in a thread
CROWDED = 0.75  # of the most
SILENT_SECONDS = 60.0  # between two lines of the log
DESCRIPTORS = Path("/proc/self/fd")
TCP_INFO_BYTES, SENT, RECEIVED = 136, slice(120, 128), slice(128, 136)  # of Linux' struct tcp_info
ESTABLISHED = 1  # its first byte
MEMORY, PAGE = Path("/proc/self/statm"), os.sysconf("SC_PAGE_SIZE")
GROWN = (
    32 * 2**20
)  # bytes that this process has more than before: then it is looked what unfinished messages take


class Connection(NamedTuple):
    descriptor: int
    address: str
    received: int  # bytes
    sent: int = 0
    name: Peer = ("", 0)


def too_many(connections: Iterable[Connection], most: int) -> list[Connection]:
    """Returns those to shut, so that `most` are left. Pure."""
    of: Mapping[str, list[Connection]] = defaultdict(list)
    for one in connections:
        of[one.address].append(one)
    counts = sorted(map(len, of.values()))
    level, left = 0, most  # what each address may have: all have it that have not less
    for index, count in enumerate(counts):
        level = left // (len(counts) - index)
        if count > level:
            break
        left -= count
    else:
        return []
    return [
        one
        for theirs in of.values()
        for one in sorted(theirs, key=lambda one: one.received)[: max(len(theirs) - level, 0)]
    ]


async def limit_connections(ports: Mapping[int, int]) -> NoReturn:
    """Shuts connections to these ports of this process that are too many, or hold too much; by port, how many
    there may be. Gives back what such calls have taken."""
    keeper, look = _Keeper(ports), 0
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        look += 1
        # For a moment there may be no free descriptor (OSError) or no thread to be had (RuntimeError).
        with suppress(OSError, RuntimeError):
            await keeper.look(settling=look % SETTLED_LOOKS == 0)


class _Keeper:
    """Looks at the connections to these ports, again and again."""

    def __init__(self, ports: Mapping[int, int]) -> None:
        self._ports = ports
        self._freed = FreedMemory(_memory)
        self._memory = 0  # bytes that this process had at the last look
        self._shut = self._held = 0  # connections, since the last line of the log
        self._told_at = float("-inf")

    async def look(self, settling: bool) -> None:
        """Raises OSError or RuntimeError if the system has nothing left for that."""
        if settling and (explained := HALVES.explained()):
            HALVES.settle(explained, await asyncio.to_thread(_moved, self._ports))
        if settling and self._freed.due():
            await asyncio.to_thread(give_back)
            self._freed.given_back()
        if _descriptors() > CROWDED * min(self._ports.values()):
            self._shut += await asyncio.to_thread(_shut_excess, self._ports)
        now = _memory()
        before, self._memory = self._memory or now, min(now, self._memory or now)
        if now > before + GROWN:
            self._held += await asyncio.to_thread(_shut_holding, self._ports)
            self._memory = now
        if (self._shut or self._held) and time.monotonic() - self._told_at >= SILENT_SECONDS:
            if self._shut:
                log.warning("too many gRPC connections: %d of those that said least were closed", self._shut)
            if self._held:
                log.warning(
                    "%d gRPC connections were closed that held most of unfinished messages", self._held
                )
            self._told_at, self._shut, self._held = time.monotonic(), 0, 0


def _moved(ports: Iterable[int]) -> dict[Peer, tuple[int, int]]:
    return {one.name: (one.received, one.sent) for _, one in _connections(ports)}


def _shut_excess(ports: Mapping[int, int]) -> int:
    of: Mapping[int, list[Connection]] = defaultdict(list)
    for port, one in _connections(ports):
        of[port].append(one)
    return sum(_shut(too_many(found, int(CROWDED * ports[port]))) for port, found in of.items())


def _shut_holding(ports: Mapping[int, int]) -> int:
    return _shut(
        too_much(
            (
                Held(one.descriptor, one.address, HALVES.held(one.name, one.received, one.sent))
                for _, one in _connections(ports)
            ),
            MOST_HELD,
        )
    )


def _shut(connections: Iterable[Connection | Held]) -> int:
    count = 0
    for one in connections:
        with suppress(OSError), _socket(one.descriptor) as held:
            if _address(held) == one.address:  # the descriptor may be another's by now
                held.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _memory() -> int:
    """Returns the bytes that this process has in memory; 0 where the system does not tell."""
    try:
        return int(MEMORY.read_text().split()[1]) * PAGE
    except (OSError, ValueError):
        return 0


def _descriptors() -> int:
    try:  # four times a second, of thousands: a folder's size is their number from Linux 6.2 on
        return DESCRIPTORS.stat().st_size or len(os.listdir(DESCRIPTORS))  # noqa: PTH208
    except OSError:
        return 0


def _connections(ports: Iterable[int]) -> Iterator[tuple[int, Connection]]:
    for number in [int(each.name) for each in DESCRIPTORS.iterdir()]:
        with suppress(OSError), _socket(number) as held:
            if held.family in (socket.AF_INET, socket.AF_INET6) and (port := held.getsockname()[1]) in ports:
                told = held.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
                if told[0] != ESTABLISHED:  # it was shut before
                    continue
                received, sent = (int.from_bytes(told[part], "little") for part in (RECEIVED, SENT))
                host, peer_port = held.getpeername()[:2]
                name = host.removeprefix("::ffff:").partition("%")[0], peer_port
                yield port, Connection(number, _address(held), received, sent, name)


def _socket(descriptor: int) -> socket.socket:
    """Returns another name of the same connection. Raises OSError if it is none."""
    other = os.dup(descriptor)
    try:
        return socket.socket(fileno=other)
    except OSError:
        os.close(other)
        raise


def _address(held: socket.socket) -> str:
    """Returns who is at the other end: of IPv6 the network, as its hosts are one's to choose."""
    host: str = held.getpeername()[0]
    if held.family == socket.AF_INET6 and not host.startswith("::ffff:"):
        return socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:8].hex()
    return host
