"""What a drafter is told at its start."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.config import check_worker, checkpoint_name, join_address
from outrider.errors import StartupError
from outrider.net.tls import TlsFiles

PROPOSERS = ("ngram",)  # sources of guesses beside a draft model


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Validated once, here: raises StartupError with a sentence that names the flag to change."""

    draft: str | None = None  # folder or hub id of the draft model's checkpoint
    propose: str | None = None  # ngram: guesses looked up in the text so far; None: the draft model's
    router: str | None = None  # host:port of the router's gRPC, to register there
    store: str | None = None  # url of the store that the routers share, to register there instead
    host: str = "127.0.0.1"  # address to listen on
    port: int = 0  # of the drafter's gRPC; 0 = any free port
    advertise: str | None = None  # host to register; None = `host`
    tls: TlsFiles | None = None  # None = peers are spoken to in the clear
    insecure: bool = False  # whether that is allowed beyond this machine
    device: str = "cpu"  # cpu, cuda or cuda:N
    dtype: str = "float32"  # float32, bfloat16 or float16
    kv_memory_bytes: int = 2**30  # size of the KV pool
    threads: int = 1  # that the model may use on a CPU, in each of its processes
    tensor_parallel_size: int = 1  # processes that the model is divided among
    max_batch_tokens: int = 512  # most tokens in a step
    prefill_chunk: int = 256  # most tokens of one prompt in a step
    branches: bool = True  # whether to draft on from likely corrections, too
    quantization: str | None = None  # int8: linear layers in 8 bits, on a CPU; None: as `dtype` says

    def __post_init__(self) -> None:
        if self.propose is None:
            if self.draft is None:
                raise StartupError("--draft is missing: name a draft model, or say --propose ngram")
            if not self.draft:
                raise StartupError("--draft must name a folder or a hub id, not nothing")
        else:
            self._check_propose(self.propose)
        check_worker(self)
        if self.quantization is not None:
            self._check_quantization()

    def _check_propose(self, kind: str) -> None:
        if kind not in PROPOSERS:
            raise StartupError(f"--propose {kind} is unknown; give {' or '.join(PROPOSERS)}, or leave it out")
        told = {
            "--draft": self.draft is not None,
            "--device": self.device != "cpu",
            "--tensor-parallel-size": self.tensor_parallel_size > 1,
            "--draft-quantization": self.quantization is not None,
        }
        for flag in (flag for flag, given in told.items() if given):
            raise StartupError(f"{flag} is for a draft model, which --propose {kind} replaces: leave one out")

    def _check_quantization(self) -> None:
        flag = f"--draft-quantization {self.quantization}"
        if self.quantization != "int8":
            raise StartupError(f"{flag} is unknown; give int8, or leave it out")
        if self.device != "cpu" or self.dtype != "float32":
            raise StartupError(
                f"{flag} is for --device cpu in float32, not {self.device} in {self.dtype}: leave it out"
            )
        if self.tensor_parallel_size > 1:
            raise StartupError(f"{flag} is for a draft model in one process: leave it out")

    @property
    def model_name(self) -> str:
        """The draft model's name, for logs and descriptions."""
        return checkpoint_name(self.draft or "")

    def advertised_address(self, port: int) -> str:
        """host:port to register, given the port that the listener got."""
        return join_address(self.advertise or self.host, port)
