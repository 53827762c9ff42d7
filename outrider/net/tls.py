"""TLS: the files that a process is told of become credentials of its servers and channels.

Every new connection asks for the files that are in force. So renewed files need no restart and break no
stream.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import grpc

from outrider.errors import StartupError
from outrider.net.watched import Watched, reason
from outrider.options.protection import TlsFiles


@dataclass(frozen=True, slots=True)
class Material:
    """The content of the files, read together."""

    cert: bytes
    key: bytes
    ca: bytes | None
    server: ssl.SSLContext  # shows the certificate and asks for none
    client: ssl.SSLContext  # shows the certificate and wants one of the authority


class Credentials(Protocol):
    """What a process makes connections with."""

    def channel_credentials(self) -> grpc.ChannelCredentials: ...
    def client_context(self) -> ssl.SSLContext: ...


class Trust:
    """How a process without a certificate is protected: its peers show one of an authority that it trusts."""

    def __init__(self, ca: Path | None = None) -> None:
        """`ca`: the authority's file; None = those that are usual. Raises StartupError."""
        try:
            self._ca = None if ca is None else ca.read_bytes()
            self._context = ssl.create_default_context(cafile=ca)
        except (OSError, ValueError) as error:
            what = "no certificate in PEM" if isinstance(error, ssl.SSLError) else reason(error)
            raise StartupError(f"--join-ca {ca} cannot be used: {what}") from None
        self._context.set_alpn_protocols(["h2"])

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self._ca)

    def client_context(self) -> ssl.SSLContext:
        return self._context


class Tls:
    """The TLS files of one process. Any thread may ask."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises StartupError if a file cannot be read or the files do not fit one another."""
        self.mutual = files.mutual
        paths = [file for file in (files.cert, files.key, files.ca) if file is not None]
        try:
            self._material = Watched("the TLS files", paths, lambda: _read(files))
        except (OSError, ValueError) as error:
            raise StartupError(f"the TLS files cannot be used: {reason(error)}") from None

    def server_credentials(self, mutual: bool) -> grpc.ServerCredentials:
        """Returns credentials for a gRPC server. With `mutual`, callers must show a certificate of the
        authority."""
        told = self._material.current()

        def configuration(material: Material) -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration(
                [(material.key, material.cert)], material.ca if mutual else None
            )

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            """Returns the files' present content, or None if nothing changed. gRPC asks at every
            connection."""
            nonlocal told
            material = self._material.current()
            if material is told:
                return None
            told = material
            return configuration(material)

        # (the stubs do not know that a fetcher may return None)
        return grpc.dynamic_ssl_server_credentials(configuration(told), renewed, mutual)  # type: ignore[arg-type]

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns credentials for a new gRPC channel. The peer must show the authority's certificate for
        its host."""
        material = self._material.current()
        return grpc.ssl_channel_credentials(material.ca, material.key, material.cert)

    def http_context(self) -> ssl.SSLContext:
        """Returns a context for an HTTPS server that asks for no certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

        def renew(connection: ssl.SSLObject, server_name: str | None, _: ssl.SSLContext) -> None:
            connection.context = self._material.current().server  # asked at every connection, named or not

        context.sni_callback = renew
        return context

    def client_context(self) -> ssl.SSLContext:
        """Returns a context for a connection to a peer, which must show the authority's certificate for its
        host."""
        return self._material.current().client


@cache
def opened(files: TlsFiles | None) -> Tls | None:
    """Returns this process's one Tls for these files, or None without files. Raises StartupError."""
    return None if files is None else Tls(files)


def shown(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None = None) -> dict[str, Any]:
    """Returns what the server's certificate says, as ssl tells of it, to a client that asks for this name;
    None = whatever its name. Raises SSLCertVerificationError if that does not take it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client.check_hostname = name is not None
    asking = client.wrap_bio(to_client, to_server, server_hostname=name)
    client.check_hostname = True
    ends = [asking, server.wrap_bio(to_server, to_client, server_side=True)]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                continue
    return dict(asking.getpeercert() or {})


def _read(files: TlsFiles) -> Material:
    """Returns the content of the files. Raises OSError or ValueError."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.set_alpn_protocols(["h2"])  # else a server of gRPC hangs up
    cert, key = files.cert.read_bytes(), files.key.read_bytes()
    ca = None if files.ca is None else files.ca.read_bytes()
    try:
        for context in (server, client):
            context.load_cert_chain(files.cert, files.key, password=_no_password)
    except ssl.SSLError as error:
        raise ValueError(_why_no_pair(files, error)) from None
    try:
        # Beside the certificates a file may hold words, in any script.
        client.load_verify_locations(cadata=(cert if ca is None else ca).decode("ascii", "ignore"))
    except ssl.SSLError:
        raise ValueError(f"{files.ca or files.cert}: no certificate in PEM") from None
    if ca is None:
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it is its own authority: only its time counts
    try:
        shown(server, client)  # under which name it will be asked for is not known here
    except ssl.SSLCertVerificationError as error:  # it has expired, or is of another authority
        raise ValueError(f"{files.cert}: {error.verify_message}") from None
    return Material(cert, key, ca, server, client)


def _why_no_pair(files: TlsFiles, error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"{files.key} is not the key of the certificate in {files.cert}"
    return f"{files.cert} or {files.key}: {(error.reason or 'not PEM').replace('_', ' ').lower()}"


def _no_password() -> str:
    """Answers instead of a question on the terminal."""
    raise ValueError("the key is encrypted; give one that is not, which only this process may read")
