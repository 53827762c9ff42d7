"""The HTTP server's connections: how many there are, and how long one keeps its place without a request.

An idle connection costs its client nothing, and the router a descriptor; without those it reaches no worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.api.body import MAX_BODY_BYTES
from router.request_parser import RequestParser
from router.untaken import Untaken

logger = logging.getLogger(__name__)
# What is written to a client that has just left: as many lines as an answer has events.
logging.getLogger("asyncio").addFilter(lambda record: record.msg != "socket.send() raised exception.")

# One in so many descriptors, for clients, and for workers that call at a port of their own; the rest is for
# calls to workers and to the store.
HTTP_SHARE, GRPC_SHARE, WORKER_SHARE = 2, 4, 8
HEAD_SECONDS = 10.0  # in which the head of a request must have come, from its first byte or the beginning
HEAD_BYTES = 64 * 1024
MOST_HEADERS = 256  # of a request: each takes 40 times its bytes, if it is short
TOO_LARGE = "431 Request Header Fields Too Large"
ENCODED = "501 Not Implemented"  # the status of RFC 9112, 6.1
URL_BYTES = 8 * 1024  # a query of 60 KB takes the event loop 20 ms, and needs no key
FREE_PIECES, LEAST_PIECE = 2048, 64  # of a body: more pieces than these have so many bytes each, on average
# Of a request, what is none of its body: its head, what comes with chunks and behind them; at least a read.
BESIDE_BYTES, BESIDE_PIECE = 2 * HEAD_BYTES + 2**18, 24  # and so many more for each piece of the body
UNREAD_BYTES = 4 * MAX_BODY_BYTES  # of a body that was refused while it came, before the next head
UNTAKEN_SECONDS = 60.0  # in which a client takes what waits for it: about 48 KiB
SILENT_SECONDS = 60.0  # between two lines of the log


class Connection(Protocol):
    """What is known of one here."""

    def waits(self) -> bool:
        """Returns True if no whole request of its client is being answered."""
        ...

    def drop(self) -> None: ...


class Connections:
    """The connections that are open, by their clients' addresses."""

    def __init__(
        self, most: int, clock: Callable[[], float] = time.monotonic, untaken: Untaken | None = None
    ) -> None:
        """`clock` gives seconds."""
        self.untaken = untaken or Untaken()
        self._most = most
        self._clock = clock
        self._open: dict[str, dict[Connection, None]] = {}  # in the order in which they came
        self._count = 0
        self._dropped = 0  # since the last line of the log
        self._told_at: float | None = None

    def add(self, address: str, connection: Connection) -> None:
        """Takes a new one. If there are too many, one that waits for its client is dropped: the oldest of the
        address that has most of them, so that who opens many loses its own. If none waits there, the new one
        is."""
        self._open.setdefault(address, {})[connection] = None
        self._count += 1
        if self._count <= self._most:
            return
        most = max(self._open, key=lambda each: len(self._open[each]))
        waiting = next((one for one in self._open[most] if one.waits()), None)
        self._tell()
        if waiting is not None:
            address, connection = most, waiting
        self.remove(address, connection)  # at once: until it is closed others may come
        connection.drop()

    def remove(self, address: str, connection: Connection) -> None:
        """Forgets a connection that is closed, or about to be."""
        of_address = self._open.get(address, {})
        if connection in of_address:
            del of_address[connection]
            self._count -= 1
            if not of_address:
                del self._open[address]

    def _tell(self) -> None:
        self._dropped += 1
        now = self._clock()
        if self._told_at is None or now - self._told_at >= SILENT_SECONDS:
            logger.warning(
                "%d connections are open, the most here: %d that waited for their clients were closed",
                self._most,
                self._dropped,
            )
            self._told_at, self._dropped = now, 0


class _Enough(Exception):
    """What a client sends further is not looked at: it stops the parser, which tells of it as a mistake."""


class _Written:
    """A transport, and who is told if what is written to it has to wait."""

    def __init__(self, transport: Any, waiting: Callable[[], int], told: Callable[[], None]) -> None:
        """`waiting` returns the bytes that do."""
        self._transport = transport
        self._waiting = waiting
        self._told = told

    def write(self, data: bytes) -> None:
        self._transport.write(data)
        if self._waiting():
            self._told()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _nothing() -> int:
    return 0


class LimitedProtocol(HttpToolsProtocol):
    """What uvicorn's protocol lacks: it waits for ever for the first byte, the end of a head, and for who
    does not read.

    And it takes any number of headers, of pieces of a body (chunks of a byte: a read of 256 KiB has 40,000,
    each a call from the parser, 100 ms of the loop), of bytes in a line behind a body (the parser copies them
    all whenever some come, and tells of none before its end), and of requests that come before the former is
    answered (pipelining). A few bytes of each become kilobytes in memory, and of a client that leaves only
    the last one is told. So the former is answered, the connection closed, and what came too early is not
    looked at: its client sends it again (RFC 9112, 9.3.2)."""

    cycle: Any
    below: Any = None  # the transport that TLS writes to, if it is spoken
    _sizes: tuple[Callable[[], int], Callable[[], int]]  # of what waits in this transport, and in that

    def __init__(
        self,
        connections: Connections,
        head_seconds: float = HEAD_SECONDS,
        untaken_seconds: float = UNTAKEN_SECONDS,
        **settings: Any,
    ) -> None:
        self._deaf = False  # what comes is not looked at any more
        self._in_head = True
        self._headers = self._url_bytes = 0  # of this head; headers after its body, too
        self._pieces = self._body_bytes = 0  # of this body
        self._beside_bytes = 0  # of this request, and none of its body
        super().__init__(**settings)
        self.parser: Any = RequestParser(self)
        self._connections = connections
        self._head_seconds = head_seconds
        self._untaken_seconds = untaken_seconds
        self._head_bytes = 0
        self._late: asyncio.TimerHandle | None = None
        self._untaken: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        above = transport.get_write_buffer_size
        self._sizes = above, _nothing if self.below is None else self.below.get_write_buffer_size
        written: Any = _Written(transport, self.untaken, lambda: self._connections.untaken.wrote(self))
        super().connection_made(written)
        self.address = self.client[0] if self.client else ""
        self._expect_head()
        self._connections.add(self.address, self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self.address, self)
        self._connections.untaken.forget(self)
        self._expect_none()
        self._taken()
        self.parser.close()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        of_body = self._body_bytes
        super().data_received(data)
        self._beside_bytes += len(data) - max(self._body_bytes - of_body, 0)
        if self._beside_bytes > BESIDE_BYTES + BESIDE_PIECE * self._pieces:
            self.drop()
            return
        if not self._between_requests():
            self._expect_none()
            return
        if self._deaf:  # it was refused, and is closed once that is written
            return
        self._expect_head()
        self._head_bytes += len(data)
        unread = self.cycle is not None and self.cycle.more_body
        if self._head_bytes > HEAD_BYTES + (UNREAD_BYTES if unread else 0):
            self.drop()

    def untaken(self) -> int:
        """Returns the bytes that were written and wait for the client."""
        above, below = self._sizes
        return above() + below()

    # Of the transport, if what is written waits for the client:

    def pause_writing(self) -> None:
        super().pause_writing()
        self._taken()
        self._untaken = self.loop.call_later(self._untaken_seconds, self.drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._taken()

    def _taken(self) -> None:
        if self._untaken is not None:
            self._untaken.cancel()
            self._untaken = None

    # Of the parser:

    def on_message_begin(self) -> None:
        if not self._between_requests():  # a request has come before the former was answered
            self.cycle.keep_alive = False
            self._look_no_further()
        self._in_head = True
        self._headers = self._url_bytes = self._pieces = self._body_bytes = self._beside_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._url_bytes += len(url)  # it may come in pieces
        if self._url_bytes > URL_BYTES:
            self._refuse("414 URI Too Long", f"the address of a request has at most {URL_BYTES} bytes")
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers += 1
        if self._headers > MOST_HEADERS:
            self._refuse(TOO_LARGE, f"a request has at most {MOST_HEADERS} headers")
        if not self._in_head:  # what follows a body is not asked for by anybody
            return
        if name.lower() == b"transfer-encoding" and value.strip().lower() != b"chunked":
            self._refuse(ENCODED, "a body comes as it is or chunked, and in no other transfer encoding")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._pieces += 1
        self._body_bytes += len(body)
        if self._pieces > FREE_PIECES + self._body_bytes // LEAST_PIECE:
            sentence = f"a body of more than {FREE_PIECES} chunks has {LEAST_PIECE} bytes in each on average"
            self._refuse("400 Bad Request", sentence)
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        if not self._deaf:  # else the parser was stopped
            super().send_400_response(msg)

    def _refuse(self, status: str, sentence: str) -> None:
        """Answers a request that is still coming, if nothing was answered yet, and looks at no more of it."""
        if self._in_head or not self.cycle.response_started:
            head = [f"HTTP/1.1 {status}", "content-type: text/plain", f"content-length: {len(sentence) + 1}"]
            self.transport.write("\r\n".join([*head, "connection: close", "", f"{sentence}\n"]).encode())
        self.transport.close()
        self._look_no_further()

    def _look_no_further(self) -> None:
        self._deaf = True
        raise _Enough  # the parser goes through none of what it still has

    def waits(self) -> bool:
        return self._between_requests() or self.cycle.more_body

    def drop(self) -> None:
        self.transport.abort()

    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self._head_seconds, self._too_late)

    def _expect_none(self) -> None:
        self._head_bytes = 0
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self._late = None
        if self._between_requests():
            self.drop()
