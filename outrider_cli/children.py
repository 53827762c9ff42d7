"""Which processes `outrider serve` consists of: pure functions from options to command lines."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from outrider_cli.options import DRAIN_SECONDS
from outrider_cli.supervisor import ChildSpec

DEFAULT_LOG_LEVEL = "warning"


@dataclass(frozen=True, slots=True)
class Models:
    """What is served."""

    target: str  # folder or hub id
    draft: str | None  # None = no draft model
    name: str  # by which clients ask for it
    propose: str | None = None  # where guesses come from without a draft model; None = plain decoding then


@dataclass(frozen=True, slots=True)
class Protection:
    """Who may speak to the processes, and how: the options of that name."""

    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    insecure: bool = False
    api_keys: Path | None = None
    worker_port: int | None = None

    @property
    def of_router(self) -> list[str]:
        told = {"--api-keys": self.api_keys, "--worker-port": self.worker_port, **self._tls}
        return [*_given(told), *(("--insecure",) if self.insecure else ())]

    @property
    def of_workers(self) -> list[str]:
        """They are on this machine: without an authority for their certificates they speak in the clear."""
        return _given(self._tls) if self.tls_ca is not None else []

    @property
    def _tls(self) -> dict[str, object]:
        return {"--tls-cert": self.tls_cert, "--tls-key": self.tls_key, "--tls-ca": self.tls_ca}


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
    branches: bool = True  # whether drafters draft on from likely corrections, too
    lock_step: bool = False
    protection: Protection = Protection()
    log_level: str = DEFAULT_LOG_LEVEL


def router_child(
    host: str,
    port: int,
    grpc_port: int,
    num_speculative_tokens: int,
    seed: int | None,
    lock_step: bool = False,
    protection: Protection = Protection(),
    log_level: str = DEFAULT_LOG_LEVEL,
) -> ChildSpec:
    command = [
        *("--host", host, "--port", str(port), "--grpc-port", str(grpc_port)),
        *("--num-speculative-tokens", str(num_speculative_tokens)),
        *(("--seed", str(seed)) if seed is not None else ()),
        *(("--lock-step",) if lock_step else ()),
        *protection.of_router,
        *_log_level(log_level),
    ]
    return ChildSpec("router", "router", _outrider("router", command), restart=False)


def worker_children(models: Models, workers: Workers, router: str) -> list[ChildSpec]:
    """Verifiers and drafters that register with the router at host:port."""
    joining = ["--router", router, *workers.protection.of_workers, *_log_level(workers.log_level)]
    common = [
        *joining,
        *("--device", workers.device, "--kv-memory", workers.kv_memory, "--threads", str(workers.threads)),
        *(("--dtype", workers.dtype) if workers.dtype is not None else ()),
    ]
    verifier = ["--target", models.target, "--name", models.name, *common]
    if workers.tensor_parallel_size > 1:
        verifier += ["--tensor-parallel-size", str(workers.tensor_parallel_size)]
    if workers.lock_step:
        verifier += ["--lock-step"]
    specs = [
        ChildSpec("verifier", name, _outrider("verifier", verifier), True, DRAIN_SECONDS)
        for name in _names("verifier", workers.verifiers)
    ]
    drafter = None
    if models.propose is not None:
        drafter = ["--propose", models.propose, *joining]
    elif models.draft is not None:
        drafter = ["--draft", models.draft, *common]
        if workers.draft_quantization is not None:
            drafter += ["--draft-quantization", workers.draft_quantization]
        if workers.lock_step or not workers.branches:
            drafter += ["--no-branches"]
    if drafter is not None:
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


def _given(options: dict[str, object]) -> list[str]:
    """Flags and values of the options that have one."""
    return [word for flag, value in options.items() if value is not None for word in (flag, str(value))]


def _log_level(level: str) -> list[str]:
    return [] if level == DEFAULT_LOG_LEVEL else ["--log-level", level]


def _outrider(role: str, options: list[str]) -> tuple[str, ...]:
    return (sys.executable, "-m", "outrider_cli", role, *options)
