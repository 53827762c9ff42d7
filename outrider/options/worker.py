"""Where a worker listens, and where it makes itself known."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.options.option import check, option, wrong
from outrider.options.protection import Protection, check_reach

WILDCARD_HOSTS = frozenset({"0.0.0.0", "::", ""})


@dataclass(frozen=True, slots=True)
class Registration:
    """Where a worker registers: at a router, or in the store that several share."""

    router: str | None = option(
        None,
        "gRPC address of the router to register with.",
        metavar="HOST:PORT",
        shown="none: --store says where",
    )
    store: str | None = option(
        None,
        "Store that the routers share, to register there instead: redis://HOST:PORT, rediss:// for TLS. "
        "In $OUTRIDER_STORE its password is seen by nobody else.",
        metavar="URL",
        shown="$OUTRIDER_STORE, or none: --router says where",
    )

    def __post_init__(self) -> None:
        if self.router is not None:
            host, _, port = self.router.rpartition(":")
            if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
                raise wrong("router", f"must be HOST:PORT, such as 127.0.0.1:50051, not {self.router!r}")
            if self.store is not None:
                raise wrong("router", "and --store both say where to register: leave one of them out")


@dataclass(frozen=True, slots=True)
class Listen:
    """Where a worker listens, and the address by which others reach it."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(0, "Port of the worker's gRPC; 0 = any free one.", least=0, most=65535)
    advertise: str | None = option(
        None, "Host by which others reach it.", metavar="HOST", shown="same as --host"
    )

    def __post_init__(self) -> None:
        check(self)
        if (self.advertise or self.host) in WILDCARD_HOSTS:
            raise wrong(
                "host",
                f"{self.host} listens on every address: say with --advertise by which one "
                "the other machines reach this one",
            )

    def advertised_address(self, port: int) -> str:
        """Returns the host:port to register, given the port that the listener got; an IPv6 host is in
        brackets."""
        host = self.advertise or self.host
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_worker(registration: Registration, listen: Listen, protection: Protection) -> None:
    """Raises WrongOption if strangers could reach the worker, or read what it says."""
    if protection.tls is not None and not protection.tls.mutual:
        raise wrong("tls_ca", "is missing: a worker's peers must show certificates, of that authority")
    check_reach(listen.host, registration.store, protection.tls, protection.insecure)
