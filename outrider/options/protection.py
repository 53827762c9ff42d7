"""Who may reach a process, and how it is protected from the others."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from outrider.options.option import option, wrong
from outrider.store.url import parse_store_url


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """What --tls-cert, --tls-key and --tls-ca name: PEM files."""

    cert: Path  # this process's certificate, followed by those between it and its authority
    key: Path  # the private key of that certificate, not encrypted
    ca: Path | None = None  # the authority whose certificates peers must show; None = clients' TLS only

    @property
    def mutual(self) -> bool:
        """True if routers, verifiers and drafters show one another certificates."""
        return self.ca is not None


@dataclass(frozen=True, slots=True)
class Protection:
    """Says if what a process says is encrypted."""

    HEADING: ClassVar = "Encryption and access"

    tls_cert: Path | None = option(
        None,
        "Certificate (PEM) that this process shows, and those above it. Read again on change.",
        metavar="FILE",
        shown="none: nothing is encrypted",
    )
    tls_key: Path | None = option(None, "Private key of it (PEM).", metavar="FILE", shown="none")
    tls_ca: Path | None = option(
        None,
        "Authority (PEM) whose certificates routers, verifiers and drafters must show one another.",
        metavar="FILE",
        shown="none: they speak in the clear, and on this machine only",
    )
    insecure: bool = option(False, "Allow what is not encrypted to leave this machine: trust the network.")

    def __post_init__(self) -> None:
        for name in ("tls_cert", "tls_key", "tls_ca"):
            absent = [other for other in ("tls_cert", "tls_key") if getattr(self, other) is None]
            if getattr(self, name) is not None and absent:
                missing = " and ".join(f"--{other.replace('_', '-')}" for other in absent)
                raise wrong(name, f"is given without {missing}: certificate and key belong together")

    @property
    def tls(self) -> TlsFiles | None:
        """Returns the TLS files; None = peers are spoken to in the clear."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_ca)


def check_reach(host: str, store: str | None, tls: TlsFiles | None, insecure: bool) -> None:
    """Raises WrongOption unless what others can reach is encrypted, or is said to be in a trusted network."""
    if store is not None:
        url = parse_store_url(store)
        if not insecure and not url.tls and not is_loopback(url.host):
            raise wrong(
                "store",
                "is on another machine and not encrypted, and prompts are kept there: use rediss://, "
                "or say --insecure where everybody in the network is trusted",
            )
    if not insecure and tls is None and not is_loopback(host):
        raise wrong(
            "host",
            f"{host} is reached from other machines: give --tls-cert, --tls-key and --tls-ca, "
            "or say --insecure where everybody in the network is trusted",
        )


def is_loopback(host: str) -> bool:
    """Returns True if only this machine reaches the host: an address, or a name that is looked up here."""
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
