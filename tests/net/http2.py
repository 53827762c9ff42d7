"""HTTP/2 by hand, for what no client of gRPC says."""

from __future__ import annotations

import asyncio
import struct

DATA, HEADERS, PING, CONTINUATION = 0, 1, 6, 9  # kinds of frames
HEAD_ENDS = 4  # flag of the last frame of a call's head
FRAME_BYTES = 2**14  # of a frame at most


def frame(kind: int, stream: int, payload: bytes, flags: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def call_head(path: str) -> bytes:
    """Returns the head of a gRPC call."""
    head = b"\x83\x86\x04" + _literal(path) + b"\x01" + _literal("x")
    for name, value in (("te", "trailers"), ("content-type", "application/grpc")):
        head += b"\x00" + _literal(name) + _literal(value)
    return head


def entry(name: str, value: str) -> bytes:
    """Returns an entry of metadata that can be said again by a byte."""
    return b"\x40" + _literal(name) + _literal(value)


async def connected(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Returns a connection, as from another machine, that has said the first of HTTP/2."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, b""))
    return reader, writer


def _literal(text: str) -> bytes:
    """Returns a string as HPACK has it (RFC 7541, 5)."""
    length, size = bytearray(), len(text)
    if size < 127:
        length.append(size)
    else:
        length.append(127)
        size -= 127
        while size >= 128:
            length.append(size % 128 + 128)
            size //= 128
        length.append(size)
    return bytes(length) + text.encode()
