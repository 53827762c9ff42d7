"""A long line between drafter and verifier, played by an HTTP proxy that holds bytes back. It needs no root.

gRPC connects through a proxy where the environment names one, by CONNECT, and only the drafters' processes
get that environment. What such a process sends over connections of its own (to the verifier, and to register)
and what it hears there is late by half a round trip each way. What is late does not hold up what follows, as
on a real line.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

CONNECT_LIMIT = 4096  # bytes of a CONNECT request
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
REFUSED = b"HTTP/1.1 502 Bad Gateway\r\n\r\n"


class Line:
    """What is under way in one direction: pure, clock passed in. Nothing overtakes anything."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[float, bytes]] = deque()  # (arrival, bytes); b"" = the end

    def send(self, data: bytes, now: float, delay: float) -> None:
        """Takes bytes that arrive `delay` seconds after `now`, or with what is before them, if later."""
        self._under_way.append((now + delay, data))

    def arrived(self, now: float) -> list[bytes]:
        """Returns what has arrived by `now`, in the order in which it was sent. It is taken off the line."""
        arrived = []
        while self._under_way and self._under_way[0][0] <= now:
            arrived.append(self._under_way.popleft()[1])
        return arrived

    @property
    def next_arrival(self) -> float | None:
        return self._under_way[0][0] if self._under_way else None


class Relay:
    """The proxy: everything that is connected through it is at the other end of the line."""

    def __init__(self) -> None:
        self.rtt_seconds = 0.0  # may be changed at any time; bytes under way arrive as they would have
        self.carried_bytes = 0  # in both directions
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Transport] = set()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Client(self), "127.0.0.1", 0)

    @property
    def environment(self) -> dict[str, str]:
        """Returns the environment by which a gRPC process connects through this relay, to any IPv4 address
        here."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()
        return {
            "GRPC_ADDRESS_HTTP_PROXY": f"{host}:{port}",
            "GRPC_ADDRESS_HTTP_PROXY_ENABLED_ADDRESSES": "127.0.0.0/8",
        }

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for connection in list(self._connections):
                connection.abort()
            await self._server.wait_closed()

    def opened(self, connection: asyncio.Transport) -> None:
        self._connections.add(connection)

    def closed(self, connection: asyncio.Transport) -> None:
        self._connections.discard(connection)


class _End(asyncio.Protocol):
    """One end of a relayed connection: what it reads goes on the line to the other end."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.transport: asyncio.Transport | None = None
        self.other: _End | None = None
        self._line = Line()  # to the other end
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.relay.opened(transport)

    def data_received(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        self.relay.carried_bytes += len(data)
        self._line.send(data, loop.time(), self.relay.rtt_seconds / 2)
        if self._timer is None:
            self._deliver()

    def connection_lost(self, exc: Exception | None) -> None:
        assert self.transport is not None
        self.relay.closed(self.transport)
        if self.other is not None:
            self.data_received(b"")

    def _deliver(self) -> None:
        """Writes what has arrived at the other end, and comes back for what is still under way."""
        loop = asyncio.get_running_loop()
        self._timer = None
        other = self.other.transport if self.other is not None else None
        for data in self._line.arrived(loop.time()):
            if other is not None and not other.is_closing():
                other.write(data) if data else other.close()
        if self._line.next_arrival is not None:
            self._timer = loop.call_at(self._line.next_arrival, self._deliver)


class _Client(_End):
    """The end that asked for the connection: its first bytes are the CONNECT request."""

    def __init__(self, relay: Relay) -> None:
        super().__init__(relay)
        self._request = b""
        self._connecting: asyncio.Task[None] | None = None

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            super().data_received(data)
            return
        self._request += data
        assert self.transport is not None
        if b"\r\n\r\n" in self._request and self._connecting is None:
            self._connecting = asyncio.create_task(self._connect(self._request))
        elif len(self._request) > CONNECT_LIMIT:
            self.transport.abort()

    async def _connect(self, request: bytes) -> None:
        assert self.transport is not None
        try:
            method, address = request.split(None, 2)[:2]
            host, _, port = address.decode("ascii").rpartition(":")
            if method != b"CONNECT":
                raise ValueError(f"a proxy of CONNECT alone was asked to {method!r}")
            loop = asyncio.get_running_loop()
            _, other = await loop.create_connection(lambda: _End(self.relay), host, int(port))
        except (OSError, ValueError):
            with suppress(OSError):
                self.transport.write(REFUSED)
            self.transport.close()
            return
        other.other = self
        self.other = other
        self.transport.write(ESTABLISHED)
        if self.transport.is_closing() and other.transport is not None:
            other.transport.close()
