"""How a model is run, and how much of it at a time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from outrider.options.memory import Share, parse_memory_or_share
from outrider.options.option import check, option, wrong

DTYPES = ("float32", "bfloat16", "float16")
AUTO = "auto"  # a kind of quantization: what this processor computes exactly
LEAST_KV_BYTES = 2**20
ON_CPU, ON_GPU = "1GiB", "90%"  # memory for keys and values where none is told


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Where a worker's model runs, and with what."""

    HEADING: ClassVar = "How the model runs"

    device: str = option("cpu", "Where the model runs: cpu, cuda or cuda:N.")
    dtype: str | None = option(
        None,
        "Number format of the model. float32 on cpu is bit-exact; the ready line says if bfloat16 is.",
        choices=DTYPES,
        shown="float32 on cpu, bfloat16 on cuda",
    )
    kv_memory: str | None = option(
        None,
        "Memory for the keys and values of a worker: a size, or a share, such as 60%, of what its device has "
        "free once the model is loaded.",
        metavar="SIZE",
        shown=f"{ON_CPU} on cpu, {ON_GPU} on cuda",
    )
    threads: int | None = option(
        None,
        "CPU threads for the model's arithmetic, in each of its processes.",
        least=1,
        shown="the cores of this machine divided among them",
    )
    tensor_parallel_size: int = option(
        1, "Processes (on GPUs: one each) that the model of a worker is divided among.", least=1
    )
    quantization: str | None = option(
        None,
        "Run linear layers in 8 bits, or with weights of 4: faster, on a CPU bit-exact, and not the "
        "checkpoint's numbers. On a GPU int8 and fp8 round the weights alone. auto = int8 if a CPU computes "
        "it exactly, int4 if weights have no more (GGUF in Q4_0, Q4_1) and the CPU no VNNI.",
        choices=("int8", "int4", "fp8", AUTO),
        shown="none",
    )

    lora: str | None = option(
        None,
        "Folder of a LoRA adapter, as peft saves it, to merge into the model.",
        metavar="FOLDER",
        shown="none",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.lora is not None and self.tensor_parallel_size > 1:
            raise wrong("lora", "is for a model in one process: merge the adapter with peft, or leave it out")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise wrong("device", f"must be cpu, cuda or cuda:N, not {self.device!r}")
        kv_memory = self.memory_for_kv
        if not isinstance(kv_memory, Share) and kv_memory < LEAST_KV_BYTES:
            raise wrong("kv_memory", f"must be at least 1MiB, not {self.kv_memory}")
        if self.quantization is not None:
            self._check_quantization(self.quantization)

    def _check_quantization(self, kind: str) -> None:
        on_cpu, told = self.device == "cpu", f"{self.device} in {self.number_format}"
        if kind != "fp8" and on_cpu and self.number_format != "float32":
            raise wrong("quantization", f"{kind} on a CPU is for float32, not {told}: leave it out")
        if (kind in (AUTO, "int4") and not on_cpu) or (kind == "fp8" and on_cpu):
            other = "int8 or int4" if on_cpu else "int8 or fp8"
            raise wrong("quantization", f"{kind} is not for --device {self.device}: give {other}")
        if not on_cpu and self.number_format == "float32":
            raise wrong("quantization", f"{kind} on a GPU is for 16 bits, not {told}: leave out --dtype")
        if self.tensor_parallel_size > 1:
            raise wrong("quantization", f"{kind} is for a model in one process: leave it out")

    @property
    def memory_for_kv(self) -> int | Share:
        """Returns the bytes of the KV pool, of all its processes together, or their share of what is free."""
        return parse_memory_or_share(self.kv_memory or (ON_CPU if self.device == "cpu" else ON_GPU))

    @property
    def number_format(self) -> str:
        """Returns the dtype that holds if nobody chose one: float32 on a CPU, where it is bit-exact, and
        bfloat16 on a GPU."""
        return self.dtype or ("float32" if self.device == "cpu" else "bfloat16")


@dataclass(frozen=True, slots=True)
class StepLimits:
    """How many tokens a worker's model runs in one step."""

    HEADING: ClassVar = "How the model runs"

    max_batch_tokens: int = option(512, "Most tokens in one step, over all sessions.", least=1)
    prefill_chunk: int = option(256, "Most tokens of one prompt in one step.", least=1)

    def __post_init__(self) -> None:
        check(self)
        if self.max_batch_tokens < self.prefill_chunk:
            least = f"{self.prefill_chunk}, the prefill chunk"
            raise wrong("max_batch_tokens", f"must be at least {least}, not {self.max_batch_tokens}")
