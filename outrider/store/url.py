"""The address of a shared store: redis://[USER][:PASSWORD]@HOST[:PORT][/DATABASE], or rediss:// for TLS.

A password may be in it, so no message ever quotes one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from outrider.errors import StartupError

DEFAULT_PORT = 6379
CERTIFICATES = "ssl_ca_certs"  # the one thing that may follow the question mark
FORM = "such as redis://127.0.0.1:6379/0, or rediss:// for TLS"


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """Where a Redis is, and how to log in."""

    host: str
    port: int
    database: int
    username: str | None
    password: str | None
    tls: bool
    ca_certs: str | None  # file of the authorities to trust; None = the system's

    def __repr__(self) -> str:
        return f"StoreUrl({self.host}:{self.port}/{self.database})"


def parse_store_url(url: str) -> StoreUrl:
    """Parses the address. Raises StartupError with a sentence that names --store."""
    parts, port = _split(url)
    if parts.scheme not in ("redis", "rediss"):
        raise StartupError(f"--store must begin with redis:// or rediss://, {FORM}")
    if not parts.hostname:
        raise StartupError(f"--store names no host: it must be a url {FORM}")
    database = parts.path.strip("/") or "0"
    if not database.isdecimal():
        raise StartupError("--store must end in the number of a database, such as /0, or in none")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    ca_certs = options.pop(CERTIFICATES, None)
    if options or parts.fragment:
        raise StartupError(f"--store may have no options but ?{CERTIFICATES}=FILE")
    if ca_certs is not None and parts.scheme == "redis":
        raise StartupError(f"--store has {CERTIFICATES} without TLS: write rediss:// instead of redis://")
    if ca_certs is not None and not Path(ca_certs).is_file():
        raise StartupError(f"--store names in {CERTIFICATES} the file {ca_certs!r}, which does not exist")
    return StoreUrl(
        host=parts.hostname,
        port=DEFAULT_PORT if port is None else port,
        database=int(database),
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        tls=parts.scheme == "rediss",
        ca_certs=ca_certs,
    )


def _split(url: str) -> tuple[SplitResult, int | None]:
    try:
        parts = urlsplit(url)
        return parts, parts.port
    except ValueError:
        raise StartupError(f"--store is no url: it must be one {FORM}") from None
