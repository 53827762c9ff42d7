"""Which processes `outrider serve` consists of: pure functions from options to command lines."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from outrider.supervisor import ChildSpec


@dataclass(frozen=True, slots=True)
class Models:
    """What is served."""

    target: str  # folder or hub id
    draft: str | None  # None = plain decoding
    name: str  # by which clients ask for it


@dataclass(frozen=True, slots=True)
class Workers:
    """How the workers are run."""

    verifiers: int
    drafters: int
    device: str
    dtype: str | None  # None = the worker's own default
    kv_memory: str
    threads: int  # of each process
    tensor_parallel_size: int = 1  # processes of each verifier
    draft_quantization: str | None = None  # of the drafters' linear layers
    lock_step: bool = False


def router_child(
    host: str,
    port: int,
    grpc_port: int,
    num_speculative_tokens: int,
    seed: int | None,
    lock_step: bool = False,
) -> ChildSpec:
    command = [
        *("--host", host, "--port", str(port), "--grpc-port", str(grpc_port)),
        *("--num-speculative-tokens", str(num_speculative_tokens)),
        *(("--seed", str(seed)) if seed is not None else ()),
        *(("--lock-step",) if lock_step else ()),
    ]
    return ChildSpec("router", "router", _outrider("router", command), restart=False)


def worker_children(models: Models, workers: Workers, router: str) -> list[ChildSpec]:
    """Verifiers and drafters that register with the router at host:port."""
    common = [
        *("--router", router, "--device", workers.device, "--kv-memory", workers.kv_memory),
        *("--threads", str(workers.threads)),
        *(("--dtype", workers.dtype) if workers.dtype is not None else ()),
    ]
    verifier = ["--target", models.target, "--name", models.name, *common]
    if workers.tensor_parallel_size > 1:
        verifier += ["--tensor-parallel-size", str(workers.tensor_parallel_size)]
    if workers.lock_step:
        verifier += ["--lock-step"]
    specs = [
        ChildSpec("verifier", name, _outrider("verifier", verifier), restart=True)
        for name in _names("verifier", workers.verifiers)
    ]
    if models.draft is not None:
        drafter = ["--draft", models.draft, *common]
        if workers.draft_quantization is not None:
            drafter += ["--draft-quantization", workers.draft_quantization]
        specs += [
            ChildSpec("drafter", name, _outrider("drafter", drafter), restart=True)
            for name in _names("drafter", workers.drafters)
        ]
    return specs


def threads_each(cores: int, workers: int) -> int:
    """The cores divided among the workers, at least one for each."""
    return max(1, cores // workers)


def _names(role: str, count: int) -> list[str]:
    return [role] if count == 1 else [f"{role}-{i + 1}" for i in range(count)]


def _outrider(role: str, options: list[str]) -> tuple[str, ...]:
    return (sys.executable, "-m", "outrider", role, *options)
