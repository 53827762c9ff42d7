"""A long line between two hosts: delay, jitter, loss, width and NAT, for all that passes between them.

The kernel may have no `tc netem`, so packets pass through a process: a TUN device in each host, a route to
the other host through it, and this file's main() in between. What it carries is IP, so TCP's own handshakes,
acknowledgements, retransmissions and windows all feel the line.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.cluster.hosts import Host
from tests.cluster.namespace import entered, ip

TUNSETIFF = 0x400454CA  # linux/if_tun.h
IFF_TUN_NO_PI = 0x0001 | 0x1000
LARGEST_PACKET = 65536
QUEUE_SECONDS = 0.4  # of packets that wait at most, where only so many pass
PACKETS_A_TURN = 64  # read from one side before the other side gets its turn


@dataclass(frozen=True, slots=True)
class Line:
    """The state of a line, the same in both directions."""

    delay_ms: float = 0.0  # one way; the round trip is twice this
    jitter_ms: float = 0.0  # each packet's delay is off by up to this
    loss: float = 0.0  # probability that a packet is lost
    cut: bool = False  # every packet is lost
    kbit_s: float = 0.0  # that pass in each direction; 0 = as many as come
    nat: bool = False  # connections are opened from the first host only

    def sent(self, now: float, free: float, size: int) -> float | None:
        """When a packet of so many bytes is on its way, in seconds; `free`: from when on the line is free.
        None = too many wait already, and it is lost."""
        if not self.kbit_s:
            return now
        begins = max(now, free)
        return None if begins > now + QUEUE_SECONDS else begins + size * 8 / (1000 * self.kbit_s)

    def arrival(self, now: float, last: float, rng: random.Random) -> float | None:
        """When a packet that is sent `now` arrives, in seconds; None = never.

        `last` is the arrival of the one before it, which it does not overtake."""
        if self.cut or rng.random() < self.loss:
            return None
        return max(now + (self.delay_ms + rng.uniform(-self.jitter_ms, self.jitter_ms)) / 1e3, last)


class Relay:
    """The process that relays, and the line that it plays."""

    def __init__(self, one: Host, other: Host) -> None:
        command = [sys.executable, __file__, one.namespace, _device(other), other.namespace, _device(one)]
        self._popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._answered()
        for here, there in ((one, other), (other, one)):
            route = (f"{there.address}/32", "dev", _device(there), "src", here.address)
            ip("-n", here.namespace, "route", "add", *route)

    def become(self, line: Line) -> None:
        """Returns when the line is so; packets under way still arrive as they would have."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps(asdict(line)) + "\n")
        self._answered()

    def close(self) -> None:
        """Takes the line away: its devices go, their routes with them, and packets take the switch again."""
        self._popen.kill()
        self._popen.communicate()

    def _answered(self) -> None:
        assert self._popen.stdout is not None
        answer = self._popen.stdout.readline()
        if answer != "ok\n":
            raise RuntimeError("the relay ended")


@contextlib.contextmanager
def relayed(one: Host, other: Host, line: Line) -> Iterator[Relay]:
    """What passes between the two hosts takes the line meanwhile; everything else the switch, as before."""
    relay = Relay(one, other)
    try:
        relay.become(line)
        yield relay
    finally:
        relay.close()


def opens(packet: bytes) -> bool:
    """Returns True if it is the first of a TCP connection (RFC 9293: SYN without ACK)."""
    ihl = 4 * (packet[0] & 15)
    return packet[9] == socket.IPPROTO_TCP and packet[ihl + 13] & 0x12 == 0x02


def _device(there: Host) -> str:
    return f"to-{there.name}"


def _tun(namespace: str, name: str) -> int:
    """The descriptor of a new TUN device in the namespace; one packet a read or write."""
    with entered(namespace):
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN_NO_PI))
    ip("-n", namespace, "link", "set", "dev", name, "up", "txqueuelen", "2000")
    return descriptor


def main(one: str, one_device: str, other: str, other_device: str) -> None:
    """Relays until standard input ends. Each line on it is a Line as JSON, answered with ok."""
    ends = (_tun(one, one_device), _tun(other, other_device))
    opposite = dict(zip(ends, reversed(ends), strict=True))
    last, free = dict.fromkeys(ends, 0.0), dict.fromkeys(ends, 0.0)
    under_way: list[tuple[float, int, int, bytes]] = []  # arrival, order, where to, packet
    line, rng, order = Line(), random.Random(0), 0
    commands = sys.stdin.fileno()
    print("ok", flush=True)
    while True:
        patience = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        readable, _, _ = select.select([commands, *ends], [], [], patience)
        if commands in readable:
            command = sys.stdin.readline()
            if not command:
                return
            line = Line(**json.loads(command))
            print("ok", flush=True)
        for end in ends:
            if end not in readable:
                continue
            for packet in _waiting(end):
                now = time.monotonic()
                sent = line.sent(now, free[end], len(packet))
                if sent is None or (line.nat and end == ends[1] and opens(packet)):
                    continue
                free[end] = sent
                arrival = line.arrival(sent, last[end], rng)
                if arrival is not None:
                    last[end], order = arrival, order + 1
                    heapq.heappush(under_way, (arrival, order, opposite[end], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(under_way)
            with contextlib.suppress(OSError):  # a full queue loses the packet, as a router's would
                os.write(end, packet)


def _waiting(end: int) -> Iterator[bytes]:
    for _ in range(PACKETS_A_TURN):
        try:
            yield os.read(end, LARGEST_PACKET)
        except BlockingIOError:
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
