"""Who crowds a gRPC server. gRPC is told how many connections there may be, and refuses more whoever has the
others. So before that some are shut: of the address that has most, those that have said least.

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

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
CROWDED = 0.75  # of the most
SILENT_SECONDS = 60.0  # between two lines of the log
DESCRIPTORS = Path("/proc/self/fd")
TCP_INFO_BYTES, RECEIVED = 136, slice(128, 136)  # of Linux' struct tcp_info


class Connection(NamedTuple):
    descriptor: int
    address: str
    received: int  # bytes


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
    """Shuts connections to these ports of this process that are too many; by port, how many there may be."""
    told_at, shut = float("-inf"), 0
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        if _descriptors() > CROWDED * min(ports.values()):
            shut += await asyncio.to_thread(_shut_excess, ports)
        if shut and time.monotonic() - told_at >= SILENT_SECONDS:
            log.warning("too many gRPC connections: %d of those that said least were closed", shut)
            told_at, shut = time.monotonic(), 0


def _shut_excess(ports: Mapping[int, int]) -> int:
    count = 0
    of: Mapping[int, list[Connection]] = defaultdict(list)
    for port, one in _connections(ports):
        of[port].append(one)
    for port, connections in of.items():
        for one in too_many(connections, int(CROWDED * ports[port])):
            with suppress(OSError), _socket(one.descriptor) as held:
                if _address(held) == one.address:  # the descriptor may be another's by now
                    held.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


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
                yield port, Connection(number, _address(held), int.from_bytes(told[RECEIVED], "little"))


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
