"""The HTTP server of a router's replica, which Serve starts: its connections are those of a router's own.

With uvicorn's, the body of a request that asks for another protocol is read as the next request: behind
HAProxy, which shares connections among its clients, as another client's. And it bounds nothing of a head, of
the pieces of a body, or of what a client does not take.
"""

from __future__ import annotations

from typing import Any

from uvicorn.config import HTTP_PROTOCOLS

from outrider.net.rpc import most_connections
from router.connections import HTTP_SHARE, Connections, LimitedProtocol

_connections = Connections(most_connections(HTTP_SHARE))


def connection(**settings: Any) -> LimitedProtocol:
    """Returns the protocol of a new connection; `settings` are uvicorn's."""
    return LimitedProtocol(_connections, **settings)


def bound() -> None:
    """To be called before Serve starts the server: it lets uvicorn choose, which looks here."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{connection.__name__}"
