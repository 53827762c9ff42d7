"""What a verifier is told at its start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.config import check_worker, checkpoint_name, join_address
from outrider.errors import StartupError
from outrider.net.tls import TlsFiles


@dataclass(frozen=True, slots=True)
class VerifierConfig:
    """Validated once, here: raises StartupError with a sentence that names the flag to change."""

    target: str  # folder or hub id of the target model's checkpoint
    router: str | None = None  # host:port of the router's gRPC, to register there
    store: str | None = None  # url of the store that the routers share, to register there instead
    host: str = "127.0.0.1"  # address to listen on
    port: int = 0  # of the verifier's gRPC; 0 = any free port
    advertise: str | None = None  # host to register; None = `host`
    tls: TlsFiles | None = None  # None = peers are spoken to in the clear
    insecure: bool = False  # whether that is allowed beyond this machine
    name: str | None = None  # under which clients ask for the model; None = the checkpoint's own
    device: str = "cpu"  # cpu, cuda or cuda:N
    dtype: str = "float32"  # float32, bfloat16 or float16
    kv_memory_bytes: int = 2**30  # size of the KV pool
    threads: int = 1  # that the model may use on a CPU, in each of its processes
    tensor_parallel_size: int = 1  # processes that the model is divided among
    max_batch_tokens: int = 512  # most tokens in a step
    prefill_chunk: int = 256  # most tokens of one prompt in a step
    drain_seconds: float = 20.0  # that its sessions get to end when it is told to leave; the rest moves
    cache: Path | None = None  # folder in which step times are remembered; None = nowhere
    lock_step: bool = False  # for comparison: a step waits until every session has its k drafts

    def __post_init__(self) -> None:
        if not self.target:
            raise StartupError("--target must name a folder or a hub id, not nothing")
        if self.name is not None and not self.name.strip():
            raise StartupError("--name must not be blank: leave it out for the checkpoint's own name")
        if not 0 <= self.drain_seconds < float("inf"):
            raise StartupError(f"--drain-seconds must be at least 0, not {self.drain_seconds}")
        check_worker(self)

    @property
    def served_name(self) -> str:
        """The name under which clients ask for the model."""
        return self.name or checkpoint_name(self.target)

    def advertised_address(self, port: int) -> str:
        """host:port to register, given the port that the listener got."""
        return join_address(self.advertise or self.host, port)
