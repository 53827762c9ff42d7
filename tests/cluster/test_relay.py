"""The line that the relay plays: as long as it says, for both directions, and for these two hosts only."""

from __future__ import annotations

import random
import socket
import sys
import time
from collections.abc import Iterator

import pytest

from tests.cluster.hosts import Host
from tests.cluster.relay import Line, relayed

PORT = 9000
ECHO = f"""
import socketserver
class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        while data := self.request.recv(65536):
            self.request.sendall(data)
class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
server = Server(("0.0.0.0", {PORT}), Echo)
print("listening", flush=True)
server.serve_forever()
"""


def test_packets_are_delayed_in_order_and_lost_as_often_as_said() -> None:
    rng = random.Random(1)
    line = Line(delay_ms=50, jitter_ms=20, loss=0.25)
    arrivals: list[float] = []
    for number in range(2000):
        arrival = line.arrival(number / 1000, arrivals[-1] if arrivals else 0.0, rng)
        if arrival is not None:
            assert 0.03 <= arrival - number / 1000 <= 0.07
            arrivals.append(arrival)
    assert arrivals == sorted(arrivals)
    assert 1400 < len(arrivals) < 1600
    assert Line(cut=True).arrival(0.0, 0.0, rng) is None


def test_a_narrow_line_passes_so_much_and_loses_what_waits_too_long() -> None:
    line, free, sent = Line(kbit_s=80), 0.0, 0
    for number in range(4000):
        left = line.sent(number / 1000, free, 100)
        if left is not None:
            assert number / 1000 < left < number / 1000 + 0.5
            free, sent = left, sent + 100
    assert 4 * 9_000 < sent < 4 * 11_500
    assert Line().sent(1.0, 9.0, 100) == 1.0


@pytest.fixture(scope="module")
def echo(hosts: dict[str, Host]) -> Iterator[Host]:
    """A host with a server that sends everything back."""
    server = hosts["target"].start(sys.executable, "-c", ECHO)
    server.wait_for("listening")
    yield hosts["target"]
    server.kill()


def round_trip(here: Host, there: Host, size: int = 1) -> float:
    """Seconds until `size` bytes that were sent are back, over a connection that stands."""
    with here.entered(), socket.create_connection((there.address, PORT), timeout=120) as connection:
        started = time.monotonic()
        connection.sendall(bytes(size))
        while size:
            size -= len(connection.recv(65536))
        return time.monotonic() - started


@pytest.mark.netns
def test_only_what_passes_between_the_two_hosts_is_delayed(hosts: dict[str, Host], echo: Host) -> None:
    with relayed(hosts["draft"], echo, Line(delay_ms=40)) as relay:
        assert min(round_trip(hosts["draft"], echo) for _ in range(5)) >= 0.08
        assert min(round_trip(hosts["spare"], echo) for _ in range(20)) < 0.08
        relay.become(Line())
        assert min(round_trip(hosts["draft"], echo) for _ in range(20)) < 0.08
    assert min(round_trip(hosts["draft"], echo) for _ in range(20)) < 0.08


@pytest.mark.netns
def test_tcp_gets_everything_across_a_line_that_loses_packets(hosts: dict[str, Host], echo: Host) -> None:
    with relayed(hosts["draft"], echo, Line(delay_ms=1, jitter_ms=1, loss=0.02)):
        round_trip(hosts["draft"], echo, size=100_000)


@pytest.mark.netns
def test_a_host_behind_nat_calls_and_is_not_called(hosts: dict[str, Host], echo: Host) -> None:
    with relayed(hosts["draft"], echo, Line(nat=True)):
        round_trip(hosts["draft"], echo, size=1000)
    with relayed(echo, hosts["draft"], Line(nat=True)), hosts["draft"].entered(), pytest.raises(TimeoutError):
        socket.create_connection((echo.address, PORT), timeout=0.5)


@pytest.mark.netns
def test_a_line_that_is_cut_carries_nothing(hosts: dict[str, Host], echo: Host) -> None:
    with (
        relayed(hosts["draft"], echo, Line()) as relay,
        hosts["draft"].entered(),
        socket.create_connection((echo.address, PORT), timeout=120) as connection,
    ):
        relay.become(Line(cut=True))
        connection.sendall(b"x")
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        relay.become(Line())
        connection.settimeout(120)
        assert connection.recv(1) == b"x"
