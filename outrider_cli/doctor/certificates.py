"""Whether certificate, key and authority belong together, for whom they are, and for how long."""

from __future__ import annotations

import ssl
from typing import Any

from outrider.errors import StartupError
from outrider.net.tls import Tls, shown
from outrider.options.protection import TlsFiles
from outrider_cli.doctor.finding import Finding

DAY = 86400.0
LEAST_DAYS = 14.0  # that a certificate is to last yet
NAMES = ("DNS", "IP Address")  # of what may stand in a certificate, those by which one is reached


def certificates(files: TlsFiles, names: list[str], unix_time: float) -> list[Finding]:
    """Returns what is the case with the files of a process that is reached by these names and addresses.
    `unix_time`: seconds."""
    try:
        tls = Tls(files)
    except StartupError as error:
        todo = "give files that belong together and are in force (docs/security.md)"
        return [Finding("certificate", error.message, todo)]
    found = []
    server, context = tls.http_context(), tls.client_context()
    about = shown(server, context)
    own = ", ".join(sorted(value for kind, value in about.get("subjectAltName", ()) if kind in NAMES))
    for name in names:
        try:
            shown(server, context, name)
        except ssl.SSLCertVerificationError:
            said = f"{files.cert} is for {own or 'nobody'}, and not for {name}"
            found.append(Finding("certificate", said, f"have {name} in it as a subjectAltName"))
    found += [lasting(str(files.cert), about, unix_time)]
    if files.ca is not None:
        found += [lasting(str(files.ca), each, unix_time) for each in context.get_ca_certs()]
    wrong = [each for each in found if not each.ok]
    if wrong:
        return wrong
    days = min(_days(each, unix_time) for each in (about, *context.get_ca_certs()))
    said = f"certificate, key and authority belong together, for {own}, {days:.0f} days yet"
    return [Finding("certificate", said)]


def lasting(what: str, about: dict[str, Any], unix_time: float) -> Finding:
    """Returns how long a certificate is in force yet; `about` as ssl tells of it."""
    days = _days(about, unix_time)
    if days >= LEAST_DAYS:
        return Finding("certificate", f"{what} is in force for {days:.0f} days yet")
    said = f"{what} ends in {days:.1f} days ({about['notAfter']})" if days > 0 else f"{what} has ended"
    return Finding("certificate", said, "renew it")


def _days(about: dict[str, Any], unix_time: float) -> float:
    return (ssl.cert_time_to_seconds(about["notAfter"]) - unix_time) / DAY
