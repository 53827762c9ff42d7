"""Connections to a running service over HTTP, with its key and its authority."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx

from outrider.errors import StartupError

CONNECT_SECONDS = 5.0
NOT_TRUSTED = (  # with the address
    "the certificate of {} is not signed by an authority that is trusted here: name it by --tls-ca"
)


def http_client(api_key: str | None, ca_file: Path | None, silence_seconds: float) -> httpx.Client:
    """Returns a client for who has this key. A connection on which nothing came for so long counts as broken;
    `ca_file` holds the authority of the service's certificate, None means the public ones. Raises
    StartupError if the key or the file cannot be used."""
    return httpx.Client(
        timeout=httpx.Timeout(silence_seconds, connect=CONNECT_SECONDS),
        headers=_authorization(api_key),
        verify=_ssl_context(ca_file),
        trust_env=False,  # no proxy: the server is one's own
    )


def not_trusted(error: Exception) -> bool:
    """Returns whether a connection failed by the service's certificate."""
    return "CERTIFICATE_VERIFY_FAILED" in str(error)


def _authorization(api_key: str | None) -> dict[str, str]:
    if not api_key:
        return {}
    if not (api_key.isascii() and api_key.isprintable()):
        raise StartupError("the API key holds characters that no key has: was it copied whole?")
    return {"authorization": f"Bearer {api_key}"}


def _ssl_context(ca_file: Path | None) -> ssl.SSLContext | bool:
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # an ssl.SSLError is one
        raise StartupError(f"no certificates can be read from {ca_file}: {error.strerror or error}") from None
