"""A long line between drafter and verifier, played by an HTTP proxy that holds bytes back. It needs no root.

gRPC connects through a proxy where the environment names one, by CONNECT, and only the drafters' processes
get that environment. What such a process sends over connections of its own (to the verifier, and to register)
and what it hears there is late by half a round trip each way. What is late does not hold up what follows, as
on a real line.
"""

from __future__ import annotations

import asyncio
import math
from asyncio import StreamReader, StreamWriter

ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
REFUSED = b"HTTP/1.1 502 Bad Gateway\r\n\r\n"
MOST_BYTES = 2**16  # that are read at once


class Relay:
    """The proxy: everything that is connected through it is at the other end of the line."""

    def __init__(self) -> None:
        self.rtt_seconds = 0.0  # may be changed at any time; bytes under way arrive as they would have
        self.carried_bytes = 0  # in both directions
        self._server: asyncio.Server | None = None
        self._ends: set[StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

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
            for end in self._ends:
                end.transport.abort()
            await self._server.wait_closed()

    async def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Serves one connection, whose first bytes are the CONNECT request."""
        self._ends.add(writer)
        try:
            other_reader, other_writer = await _connect(await reader.readuntil(b"\r\n\r\n"))
        except (OSError, ValueError, EOFError, asyncio.LimitOverrunError):
            writer.write(REFUSED)
            writer.close()
            self._ends.discard(writer)
            return
        self._ends.add(other_writer)
        writer.write(ESTABLISHED)
        await asyncio.gather(self._carry(reader, other_writer), self._carry(other_reader, writer))
        self._ends -= {writer, other_writer}

    async def _carry(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Carries bytes one way until they end. Nothing overtakes anything if the line gets shorter."""
        loop, arrival = asyncio.get_running_loop(), 0.0
        while True:
            try:
                data = await reader.read(MOST_BYTES)
            except OSError:
                data = b""
            self.carried_bytes += len(data)
            arrival = max(loop.time() + self.rtt_seconds / 2, math.nextafter(arrival, math.inf))
            loop.call_at(arrival, _deliver, writer, data)
            if not data:
                return


async def _connect(request: bytes) -> tuple[StreamReader, StreamWriter]:
    """Returns a connection to where a CONNECT request says. Raises ValueError if it is none."""
    method, address = request.split(None, 2)[:2]
    host, _, port = address.decode("ascii").rpartition(":")
    if method != b"CONNECT":
        raise ValueError(f"a proxy of CONNECT alone was asked to {method!r}")
    return await asyncio.open_connection(host, int(port))


def _deliver(writer: StreamWriter, data: bytes) -> None:
    """Writes what has arrived at the other end of a connection; nothing = the end."""
    if not data:
        writer.close()
    elif not writer.is_closing():
        writer.write(data)
