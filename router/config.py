"""What a router is told at its start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.config import check_at_least, check_port, check_reach
from outrider.defaults import NUM_SPECULATIVE_TOKENS
from outrider.errors import StartupError
from outrider.net.tls import TlsFiles
from outrider.sampling.params import MAX_SEED
from outrider.store.logs import SESSION_TTL_SECONDS
from outrider.store.url import parse_store_url

TLS_WORKER_PORT = 50052
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Raises StartupError for the first value that cannot be."""

    host: str = "127.0.0.1"  # address to listen on, for HTTP and gRPC
    port: int = 8000  # HTTP; 0 = any free port
    grpc_port: int = 50051  # for clients; 0 = any free port
    # At which workers register; None = TLS_WORKER_PORT with TLS, else grpc_port.
    worker_port: int | None = None
    tls: TlsFiles | None = None  # None = everybody is spoken to in the clear
    insecure: bool = False  # whether that is allowed beyond this machine
    api_keys: Path | None = None  # file of the keys, one of which a client must show
    api_key_lines: str | None = None  # the same lines, where there is no file
    store: str | None = None  # url of the store that several routers share; None = one in this process
    num_speculative_tokens: int = NUM_SPECULATIVE_TOKENS  # most in a step of any request; 0 = plain decoding
    max_sessions: int = 256  # most requests at a time
    session_ttl: int = SESSION_TTL_SECONDS  # a session can be resumed so long after its last token
    seed: int | None = None  # makes the seeds drawn for requests without one repeatable
    lock_step: bool = False  # for comparison: no draft runs ahead of its verdict, the window is k

    def __post_init__(self) -> None:
        check_port("--port", self.port)
        check_port("--grpc-port", self.grpc_port)
        if self.worker_port is not None:
            check_port("--worker-port", self.worker_port)
        if self.store is not None:
            parse_store_url(self.store)
        check_reach(self.host, self.store, self.tls, self.insecure)
        check_at_least("--num-speculative-tokens", self.num_speculative_tokens, 0)
        check_at_least("--max-sessions", self.max_sessions, 1)
        check_at_least("--session-ttl", self.session_ttl, 1)
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise StartupError(f"--seed must be from 0 to {MAX_SEED}, not {self.seed}")

    @property
    def workers_apart(self) -> bool:
        """Whether they register at a port of their own."""
        return self.tls is not None or self.worker_port is not None
