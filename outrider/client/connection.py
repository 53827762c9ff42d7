"""Connections to a running service over HTTP, with its key and its authority."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from outrider.errors import InvalidRequest, StartupError

CONNECT_SECONDS = 5.0
# Of an answer that is read as a whole: a refusal, or a word about the service.
MOST_BYTES = 1 << 20
MOST_SECONDS = 30.0
STREAM = {"stream": True}  # in the extensions of a request whose answer may have no end
NOT_TRUSTED = (  # with the address
    "the certificate of {} is not signed by an authority that is trusted here: name it by --tls-ca"
)


def server_address(url: str) -> str:
    """Returns the address of a server, without a slash at its end. Raises InvalidRequest if it is none."""
    with suppress(ValueError, httpx.InvalidURL):
        httpx.URL(url)
        written = url.isprintable() and " " not in url
        parts = urlsplit(url)
        if written and parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url.rstrip("/")
    raise InvalidRequest(f"--url must be http:// or https:// and a host, not {url}")


def http_client(api_key: str | None, ca_file: Path | None, silence_seconds: float) -> httpx.Client:
    """Returns a client for who has this key. A connection on which nothing came for so long counts as broken;
    `ca_file` holds the authority of the service's certificate, None means the public ones. Raises
    StartupError if the key or the file cannot be used."""
    return httpx.Client(
        timeout=httpx.Timeout(silence_seconds, connect=CONNECT_SECONDS),
        headers={"accept-encoding": "identity", **authorization(api_key)},
        transport=_Bounded(verify=_ssl_context(ca_file), trust_env=False),
        trust_env=False,  # no proxy: the server is one's own
    )


class _Bounded(httpx.HTTPTransport):
    """What a server says costs no more memory than it should, whatever it is: no answer is unpacked, as few
    bytes could become gigabytes, and one that is no stream counts as broken once it is too large or slow."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        response.headers.pop("content-encoding", None)
        if response.status_code >= 400 or "stream" not in request.extensions:
            response.stream = _Counted(response.stream, request)
        return response


class _Counted(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream | httpx.AsyncByteStream, request: httpx.Request) -> None:
        assert isinstance(stream, httpx.SyncByteStream)
        self._stream = stream
        self._request = request

    def __iter__(self) -> Iterator[bytes]:
        size, until = 0, time.monotonic() + MOST_SECONDS
        for piece in self._stream:
            size += len(piece)
            if size > MOST_BYTES or time.monotonic() > until:
                raise httpx.ReadError("the answer has no end", request=self._request)
            yield piece

    def close(self) -> None:
        self._stream.close()


def not_trusted(error: Exception) -> bool:
    """Returns whether a connection failed by the service's certificate."""
    return "CERTIFICATE_VERIFY_FAILED" in str(error)


def authorization(api_key: str | None) -> dict[str, str]:
    """Returns the header that shows a key. Raises StartupError if it is none: httpx would only say that the
    connection failed, and it would be asked again."""
    if not api_key:
        return {}
    if not (api_key.isascii() and api_key.isprintable() and api_key == api_key.strip()):
        raise StartupError("the API key holds characters that no key has: was it copied whole?")
    return {"authorization": f"Bearer {api_key}"}


def _ssl_context(ca_file: Path | None) -> ssl.SSLContext | bool:
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # an ssl.SSLError is one
        raise StartupError(f"no certificates can be read from {ca_file}: {error.strerror or error}") from None
