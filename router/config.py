"""What a router is told at its start."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.config import check_at_least, check_port
from outrider.errors import StartupError
from outrider.sampling.params import MAX_SEED
from outrider.store.url import parse_store_url


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Raises StartupError for the first value that cannot be."""

    host: str = "127.0.0.1"  # address to listen on, for HTTP and gRPC
    port: int = 8000  # HTTP; 0 = any free port
    grpc_port: int = 50051  # Generation and Registry; 0 = any free port
    store: str | None = None  # url of the store that several routers share; None = one in this process
    num_speculative_tokens: int = 8  # most draft tokens in a step of any request; 0 = plain decoding
    max_sessions: int = 256  # most requests at a time
    seed: int | None = None  # makes the seeds drawn for requests without one repeatable
    lock_step: bool = False  # for comparison: no draft runs ahead of its verdict, the window is k

    def __post_init__(self) -> None:
        check_port("--port", self.port)
        check_port("--grpc-port", self.grpc_port)
        if self.store is not None:
            parse_store_url(self.store)
        check_at_least("--num-speculative-tokens", self.num_speculative_tokens, 0)
        check_at_least("--max-sessions", self.max_sessions, 1)
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise StartupError(f"--seed must be from 0 to {MAX_SEED}, not {self.seed}")
