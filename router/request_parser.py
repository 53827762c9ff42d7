"""httptools' parser of requests, but that one which asks for another protocol keeps its body.

httptools takes what follows the head of such a request for the other protocol's. Nothing is upgraded here,
so it is the request's body (RFC 9110, 7.8). If it were left to httptools, clients that ask for HTTP/2 in
passing would lose their bodies, and what comes a little later would be read as a request: behind a proxy, as
another client's.
"""

from __future__ import annotations

from typing import Any

import httptools

FRAMING = frozenset({b"content-length", b"transfer-encoding"})  # which say where the body ends


class RequestParser:
    """Stands in the place of httptools' own. `protocol` has its callbacks."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._framing: list[tuple[bytes, bytes]] = []  # of the head that is read
        self._upgrades = False
        self._again = False  # it reads the head once more, without the wish
        self._parser = self._new()

    def close(self) -> None:
        """Lets go of what it holds: the two parsers are in a cycle, which the collector may find late."""
        self._parser = self._protocol = None

    def feed_data(self, data: bytes) -> None:
        """Raises httptools.HttpParserError."""
        rest = memoryview(data)
        while True:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
                self._go_on_without()

    def _new(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        return parser

    def _go_on_without(self) -> None:
        """Begins anew with what of the head concerns the body."""
        self._parser, self._again, self._upgrades = self._new(), True, False
        lines = [b"POST / HTTP/1.1", *(name + b": " + value for name, value in self._framing), b"", b""]
        self._parser.feed_data(b"\r\n".join(lines))

    # What uvicorn asks of a head.

    def get_method(self) -> bytes:
        return bytes(self._parser.get_method())

    def get_http_version(self) -> str:
        return str(self._parser.get_http_version())

    def should_keep_alive(self) -> bool:
        return bool(self._parser.should_keep_alive())

    def should_upgrade(self) -> bool:
        return False

    # httptools' callbacks.

    def on_message_begin(self) -> None:
        if not self._again:
            self._framing = []
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._again:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._again:
            return
        if name.lower() in FRAMING:
            self._framing.append((name, value))
        self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._again:
            self._again = False
            return
        self._upgrades = self._parser.should_upgrade()
        self._protocol.on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._protocol.on_body(body)

    def on_message_complete(self) -> None:
        if not self._upgrades:  # else it is not
            self._protocol.on_message_complete()
