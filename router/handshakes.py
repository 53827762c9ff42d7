"""TLS of HTTP connections: one counts from its first byte, not from the end of its handshake.

asyncio tells a protocol of a connection when its handshake is done; until then nobody would know of it.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio import sslproto
from collections.abc import Callable
from typing import Any

from router.connections import HEAD_SECONDS, Connections, LimitedProtocol

# That TLS reads at once. asyncio takes as much memory for each connection before its first byte: 256 KiB, of
# which thousands of half handshakes had made a router 2 GiB large.
READ_BYTES = 32 * 1024
sslproto.SSLProtocol.max_size = READ_BYTES


class Handshake(asyncio.Protocol):
    """A connection whose handshake is not done. Then its protocol is made, and takes its place."""

    def __init__(
        self,
        connections: Connections,
        make: Callable[[], LimitedProtocol],
        context: ssl.SSLContext,
        seconds: float = HEAD_SECONDS,
    ) -> None:
        self._connections = connections
        self._make = make
        self._context = context
        self._seconds = seconds

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._address = (transport.get_extra_info("peername") or ("",))[0]
        self._connections.add(self._address, self)
        if transport.is_closing():
            return
        transport.pause_reading()  # what comes is for TLS
        self._task = asyncio.create_task(self._shake())

    async def _shake(self) -> None:
        loop, early = asyncio.get_running_loop(), _Early()
        transport: Any = None
        try:
            transport = await loop.start_tls(
                self._transport, early, self._context, server_side=True, ssl_handshake_timeout=self._seconds
            )
        except (OSError, asyncio.CancelledError):  # an SSLError is one
            self._transport.abort()
        finally:
            self._connections.remove(self._address, self)
        if transport is None or early.lost:
            return
        protocol = self._make()
        protocol.below = self._transport
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if early.data:
            protocol.data_received(bytes(early.data))
        if early.ended:
            protocol.eof_received()

    def waits(self) -> bool:
        return True

    def drop(self) -> None:
        self._transport.abort()


class _Early(asyncio.Protocol):
    """Keeps what comes between the end of a handshake and its protocol."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.ended = self.lost = False

    def data_received(self, data: bytes) -> None:
        self.data += data

    def eof_received(self) -> None:
        self.ended = True

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
