"""What a worker is told at its start, as far as verifier and drafter share it, and the checks of it.

A failed check raises StartupError with one sentence that names the flag and what to change.
"""

from __future__ import annotations

import ipaddress
import math
import re
import socket
from pathlib import Path
from typing import Protocol

from outrider.errors import StartupError
from outrider.net.tls import TlsFiles
from outrider.store.url import parse_store_url

WILDCARD_HOSTS = frozenset({"0.0.0.0", "::", ""})
DTYPES = ("float32", "bfloat16", "float16")
MEMORY_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class WorkerSettings(Protocol):
    """The part that the configurations of both kinds of worker have."""

    @property
    def router(self) -> str | None: ...  # host:port of the router's gRPC, to register there
    @property
    def store(self) -> str | None: ...  # url of the store that the routers share, to register there instead
    @property
    def host(self) -> str: ...  # address to listen on
    @property
    def port(self) -> int: ...  # of the worker's gRPC; 0 = any free port
    @property
    def advertise(self) -> str | None: ...  # host to register; None = `host`
    @property
    def tls(self) -> TlsFiles | None: ...  # None = peers are spoken to in the clear
    @property
    def insecure(self) -> bool: ...  # whether that is allowed beyond this machine
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def kv_memory_bytes(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def tensor_parallel_size(self) -> int: ...
    @property
    def max_batch_tokens(self) -> int: ...  # most tokens in a step
    @property
    def prefill_chunk(self) -> int: ...  # most tokens of one prompt in a step


def check_worker(settings: WorkerSettings) -> None:
    """Raises StartupError for the first value that cannot be."""
    if settings.router is not None:
        check_address("--router", settings.router)
    if settings.store is not None:
        parse_store_url(settings.store)
    if settings.router is not None and settings.store is not None:
        raise StartupError("--router and --store both say where to register: leave one of them out")
    check_port("--port", settings.port)
    if (settings.advertise or settings.host) in WILDCARD_HOSTS:
        raise StartupError(
            f"--host {settings.host} listens on every address: say with --advertise by which one "
            "the other machines reach this one"
        )
    if settings.tls is not None and not settings.tls.mutual:
        raise StartupError("--tls-ca is missing: a worker's peers must show certificates, of that authority")
    check_reach(settings.host, settings.store, settings.tls, settings.insecure)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", settings.device):
        raise StartupError(f"--device must be cpu, cuda or cuda:N, not {settings.device!r}")
    if settings.dtype not in DTYPES:
        raise StartupError(f"--dtype must be one of {', '.join(DTYPES)}, not {settings.dtype!r}")
    check_at_least("--kv-memory", settings.kv_memory_bytes, 2**20)
    check_at_least("--threads", settings.threads, 1)
    check_at_least("--tensor-parallel-size", settings.tensor_parallel_size, 1)
    check_at_least("--prefill-chunk", settings.prefill_chunk, 1)
    check_at_least("--max-batch-tokens", settings.max_batch_tokens, settings.prefill_chunk)


def tls_files(cert: Path | None, key: Path | None, ca: Path | None) -> TlsFiles | None:
    """What the three flags say together; None = no TLS. Raises StartupError where one is missing."""
    if cert is not None and key is not None:
        return TlsFiles(cert, key, ca)
    for flag, file in (("--tls-cert", cert), ("--tls-key", key), ("--tls-ca", ca)):
        if file is not None:
            missing = " and ".join(
                other for other, told in (("--tls-cert", cert), ("--tls-key", key)) if told is None
            )
            raise StartupError(f"{flag} is given without {missing}: certificate and key belong together")
    return None


def check_reach(host: str, store: str | None, tls: TlsFiles | None, insecure: bool) -> None:
    """What others could read or speak to is encrypted, or said to be in a network that is trusted.

    Raises StartupError."""
    if insecure:
        return
    if tls is None and not is_loopback(host):
        raise StartupError(
            f"--host {host} is reached from other machines: give --tls-cert, --tls-key and --tls-ca, "
            "or say --insecure where everybody in the network is trusted"
        )
    if store is not None and not (url := parse_store_url(store)).tls and not is_loopback(url.host):
        raise StartupError(
            "--store is on another machine and not encrypted, and prompts are kept there: use rediss://, "
            "or say --insecure where everybody in the network is trusted"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host: an address, or a name by what it means here."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except (OSError, UnicodeError):
        return False
    addresses = {str(address[0]).partition("%")[0] for *_, address in found}
    return bool(addresses) and all(ipaddress.ip_address(address).is_loopback for address in addresses)


def check_at_least(flag: str, value: int, least: int) -> None:
    if value < least:
        raise StartupError(f"{flag} must be at least {least}, not {value}")


def check_port(flag: str, port: int) -> None:
    if not 0 <= port <= 65535:
        raise StartupError(f"{flag} must be from 0 (any free port) to 65535, not {port}")


def check_address(flag: str, address: str) -> None:
    """An address to connect to: a host and a port above 0."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise StartupError(f"{flag} must be HOST:PORT, such as 127.0.0.1:50051, not {address!r}")


def parse_memory(text: str) -> int:
    """Bytes in a size such as 512MiB, 2G or 1073741824. K, M, G and T are powers of 1024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise StartupError(f"--kv-memory must be a size such as 512MiB or 2GiB, not {text!r}")
    return int(float(found[1]) * MEMORY_UNITS[found[2].upper()])


def memory_text(count: float) -> str:
    """So many bytes as parse_memory reads them, such as 1.5GiB: a little less rather than more."""
    fitting = [unit for unit, size in MEMORY_UNITS.items() if count >= size] or [""]
    unit, size = fitting[-1], MEMORY_UNITS[fitting[-1]]
    return f"{math.floor(count / size * 10) / 10:g}{unit and unit + 'i'}B"


def default_dtype(device: str) -> str:
    """float32 on a CPU, where it is bit-exact; bfloat16 on a GPU."""
    return "float32" if device == "cpu" else "bfloat16"


def checkpoint_name(model: str) -> str:
    """The last part of a checkpoint's path or hub id."""
    return model.rstrip("/").rpartition("/")[2] or model


def join_address(host: str, port: int) -> str:
    """host:port, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
