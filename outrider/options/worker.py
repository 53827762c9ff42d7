"""Where a worker listens, and where it makes itself known."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple
from urllib.parse import urlsplit

from outrider.options.option import check, option, wrong
from outrider.options.protection import Protection, check_reach, is_loopback

WILDCARD_HOSTS = frozenset({"0.0.0.0", "::", ""})
PORTS = {"https": 443, "http": 80}


@dataclass(frozen=True, slots=True)
class Registration:
    """Where a worker registers: at a router, or in the store that several share."""

    HEADING: ClassVar = "Other processes"

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

    HEADING: ClassVar = "Other processes"

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


class JoinUrl(NamedTuple):
    """Where a router takes in drafters that nobody can call."""

    address: str  # host:port of its gRPC
    encrypted: bool


@dataclass(frozen=True, slots=True, repr=False)  # the token is for nobody's eyes
class Joining:
    """How a drafter joins that nobody can call: it calls the routers, and shows a token."""

    HEADING: ClassVar = "Other processes"

    join: str | None = option(
        None,
        "Join from anywhere, also from behind NAT: https://HOST:PORT of the gRPC of a router, of several "
        "routers with commas between.",
        metavar="URL",
        shown="none: it registers, and is called",
    )
    token: str | None = option(
        None,
        "Token to join with, of `outrider keys add`. Other users of this machine see it here, and not in "
        "$OUTRIDER_TOKEN or --token-file.",
        metavar="TOKEN",
        shown="$OUTRIDER_TOKEN",
    )
    token_file: Path | None = option(
        None, "File that holds the token. Read whenever it joins.", metavar="FILE", shown="none"
    )
    join_ca: Path | None = option(
        None,
        "Authority (PEM) of the certificates of routers and verifiers that it joins.",
        metavar="FILE",
        shown="those that are usual",
    )

    def __post_init__(self) -> None:
        if self.join is None:
            for name in ("token", "token_file", "join_ca"):
                if getattr(self, name) is not None:
                    raise wrong(name, "is of no use without --join")
            return
        if self.token is None and self.token_file is None:
            raise wrong("join", "needs a token: put it into $OUTRIDER_TOKEN, or into a file for --token-file")
        if self.token is not None and self.token_file is not None:
            raise wrong("token", "and --token-file both hold a token: leave one out")
        if self.token is not None and not is_token(self.token):
            raise wrong("token", "is none of `outrider keys add NAME --drafter-tokens FILE`")
        urls = self.urls
        if len({url.encrypted for url in urls}) > 1:
            raise wrong("join", "has https and http: a drafter speaks TLS with all routers, or with none")
        if self.join_ca is not None and not urls[0].encrypted:
            raise wrong("join_ca", "is of no use with http://")

    @property
    def urls(self) -> tuple[JoinUrl, ...]:
        """Returns where it joins. Raises WrongOption."""
        return tuple(dict.fromkeys(_join_url(each.strip()) for each in (self.join or "").split(",")))


def is_token(text: str) -> bool:
    """Returns True if a header can carry it."""
    return bool(re.fullmatch(r"[\w.~+/=-]{1,256}", text, re.ASCII))


def _join_url(text: str) -> JoinUrl:
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or parts.scheme not in PORTS or parts.path.strip("/") or parts.query or parts.username:
        told = "" if "@" in text else f", not {text!r}"  # it may hold a password
        raise wrong("join", f"must be https://HOST:PORT, or several with commas between{told}")
    host = f"[{host}]" if ":" in host else host
    return JoinUrl(f"{host}:{port or PORTS[parts.scheme]}", parts.scheme == "https")


def check_joining(
    joining: Joining, registration: Registration, listen: Listen, protection: Protection
) -> None:
    """Raises WrongOption if a drafter is told to join and to be called, too, or if others could read its
    token."""
    if joining.join is None:
        return
    told = {
        "router": registration.router is not None,
        "store": registration.store is not None,
        "advertise": listen.advertise is not None,
        "tls_cert": protection.tls_cert is not None,
    }
    for name in (name for name, given in told.items() if given):
        raise wrong(name, "is for a drafter that others call; with --join nobody does: leave one out")
    for url in joining.urls:
        if not (url.encrypted or protection.insecure or is_loopback(url.address.rpartition(":")[0])):
            raise wrong(
                "join",
                "leads to another machine without TLS, where the token and prompts can be read on the way: "
                "use https://, or say --insecure where everybody in the network is trusted",
            )


def check_worker(registration: Registration, listen: Listen, protection: Protection) -> None:
    """Raises WrongOption if strangers could reach the worker, or read what it says."""
    if protection.tls is not None and not protection.tls.mutual:
        raise wrong("tls_ca", "is missing: a worker's peers must show certificates, of that authority")
    check_reach(listen.host, registration.store, protection.tls, protection.insecure)
