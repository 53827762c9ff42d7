"""Whether ports can be listened on."""

from __future__ import annotations

import errno
import socket

from outrider_cli.doctor.finding import Finding


def port(host: str, number: int) -> Finding:
    """Listens there for a moment."""
    where = f"{number} at {host}"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, number), family=family).close()
    except OSError as error:
        return Finding("port", f"{where} cannot be used ({error.strerror or error})", _todo(error.errno))
    return Finding("port", f"{where} is free")


def _todo(number: int | None) -> str:
    if number == errno.EADDRINUSE:
        return "end what listens there, or give another port (`ss -ltnp` says who it is)"
    if number == errno.EACCES:
        return "give a port from 1024 on, or the right to use this one"
    return "give an address of this machine as --host"
