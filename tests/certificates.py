"""An authority and its certificates, made as docs/security.md says."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from outrider.net.tls import TlsFiles

DAY = datetime.timedelta(days=1)


def _pem(key: ec.EllipticCurvePrivateKey, password: bytes | None = None) -> bytes:
    protection = (
        serialization.NoEncryption() if password is None else serialization.BestAvailableEncryption(password)
    )
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protection)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general(name: str) -> x509.GeneralName:
    if name.startswith("outrider:"):
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


@dataclass
class Authority:
    """It signs for whoever asks."""

    name: str = "test authority"
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    days: tuple[int, int] = (-1, 1)  # from when until when its own certificate is good

    def __post_init__(self) -> None:
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        self.certificate = self._signed(_named(self.name), self.key, constraints, self.days)

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def pair(
        self, *names: str, password: bytes | None = None, days: tuple[int, int] = (-1, 1)
    ) -> tuple[bytes, bytes]:
        """Certificate and key, in PEM, of one who is reached by these names and addresses; `days`: from when
        until when it is good, from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternative = x509.SubjectAlternativeName([_general(name) for name in names])
        signed = self._signed(_named("outrider"), key, alternative, days)
        return signed.public_bytes(serialization.Encoding.PEM), _pem(key, password)

    def write(self, folder: Path, *names: str) -> TlsFiles:
        """The three files of one process."""
        folder.mkdir(parents=True, exist_ok=True)
        files = TlsFiles(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
        cert, key = self.pair(*(names or ("127.0.0.1", "localhost")))
        files.cert.write_bytes(cert)
        files.key.write_bytes(key)
        assert files.ca is not None
        files.ca.write_bytes(self.pem)
        return files

    def _signed(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        extension: x509.ExtensionType,
        days: tuple[int, int] = (-1, 1),
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(_named(self.name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + days[0] * DAY)
            .not_valid_after(now + days[1] * DAY)
            .add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
            .sign(self.key, hashes.SHA256())
        )


def serial(pem: str | bytes) -> int:
    """Returns the serial number of a certificate in PEM."""
    data = pem.encode() if isinstance(pem, str) else pem
    return x509.load_pem_x509_certificate(data).serial_number


def flags(files: TlsFiles) -> list[str]:
    """The command line's."""
    return ["--tls-cert", str(files.cert), "--tls-key", str(files.key), "--tls-ca", str(files.ca)]
