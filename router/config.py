"""What a router is told at its start."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from outrider.options.option import check, option
from outrider.options.protection import Protection, check_reach
from outrider.options.sessions import SessionOptions
from outrider.options.telemetry import Export, Logging
from outrider.options.worker import Listen

TLS_WORKER_PORT = 50052
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The options of a router. Raises StartupError for the first value that cannot be."""

    host: str = option(LOOPBACK, "Address to listen on, for HTTP and gRPC.")
    port: int = option(8000, "Port of the HTTP API; 0 = any free one.", least=0, most=65535)
    grpc_port: int = option(
        50051,
        "Port of gRPC, for clients, and for workers where no other is theirs; 0 = any free one.",
        least=0,
        most=65535,
    )
    sessions: SessionOptions = field(default=SessionOptions())
    store: str | None = option(
        None,
        "Store shared with other routers: redis://HOST:PORT, rediss:// for TLS. "
        "In $OUTRIDER_STORE its password is seen by nobody else.",
        metavar="URL",
        shown="$OUTRIDER_STORE, or this router's own memory",
        heading=Listen.HEADING,
    )
    worker_port: int | None = option(
        None,
        "Port at which workers register; 0 = any free one.",
        least=0,
        most=65535,
        shown=f"{TLS_WORKER_PORT} with TLS, otherwise --grpc-port",
        heading=Listen.HEADING,
    )
    protection: Protection = field(default=Protection())
    api_keys: Path | None = option(
        None,
        "Keys of the clients, hashed: lines of `outrider keys add NAME`. Read again on change.",
        metavar="FILE",
        shown="$OUTRIDER_API_KEYS, or none: everybody may ask",
        heading=Protection.HEADING,
    )
    drafter_tokens: Path | None = option(
        None,
        "Tokens of drafters that join from anywhere, hashed: lines of `outrider keys add NAME "
        "--drafter-tokens FILE`. Read again on change.",
        metavar="FILE",
        shown="none: all drafters register",
        heading=Protection.HEADING,
    )
    record: Path | None = option(
        None,
        "Keep the prompts of requests in this file, for `outrider distill --prompts`: the newest 64 MiB.",
        metavar="FILE",
        shown="none: no prompt is kept",
        heading=Logging.HEADING,
    )
    export: Export = field(default=Export())
    api_key_lines: str | None = None  # the keys, if there is no file

    def __post_init__(self) -> None:
        check(self)
        check_reach(self.host, self.store, self.protection.tls, self.protection.insecure)

    @property
    def workers_apart(self) -> bool:
        """Returns True if workers register at a port of their own."""
        return self.protection.tls is not None or self.worker_port is not None
