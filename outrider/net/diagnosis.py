"""Why a peer cannot be reached, in a sentence: gRPC says UNAVAILABLE for all of it.

A connection made by hand tells more: whether somebody listens there, speaks TLS, shows a certificate that is
good, and takes ours.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress

from outrider.net.tls import Credentials

SECONDS = 1.0  # for the connection, and again for the first bytes
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)  # and an empty SETTINGS frame
ALERT = b"\x15\x03"  # the beginning of what a TLS server answers to anything else


async def why_unreachable(address: str, tls: Credentials | None, seconds: float = SECONDS) -> str:
    """Returns a sentence that says why no gRPC connection to host:port comes about, or "" if one does.
    `seconds`: as SECONDS."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    context = None if tls is None else tls.client_context()
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(
                host, int(port), ssl=context, server_hostname=host if context else None
            )
    except TimeoutError:
        return f"nothing comes back from {address}"
    except ssl.SSLCertVerificationError as error:
        return f"the certificate that {address} shows is not good: {error.verify_message.rstrip('.')}"
    except ssl.SSLError as error:
        if error.reason == "WRONG_VERSION_NUMBER":
            return f"{address} speaks no TLS, and this process was told to"
        return f"no TLS connection to {address}: {_words(error)}"
    except ConnectionError as error:
        if context is not None and not isinstance(error, ConnectionRefusedError):
            return f"{address} ends a TLS connection while it is made"
        return f"nothing listens at {address}"
    except socket.gaierror:
        return f"the name in {address} is not known here"
    except (OSError, ValueError, OverflowError) as error:  # the last: a port of 65536
        return f"{address} cannot be reached: {getattr(error, 'strerror', None) or error}"
    try:
        return await _first_words(reader, writer, address, tls is not None, seconds)
    finally:
        writer.close()
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(SECONDS):
                await writer.wait_closed()


async def _first_words(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    address: str,
    encrypted: bool,
    seconds: float,
) -> str:
    """Returns what is wrong with a connection that stands. A server of gRPC speaks first."""
    writer.write(PREFACE)
    try:
        async with asyncio.timeout(seconds):
            said = await reader.read(64)
    except TimeoutError:
        return f"{address} takes connections and says nothing"
    except ssl.SSLError as error:  # with TLS 1.3 a server looks at our certificate after we are done
        return f"{address} does not take this process's certificate: {_words(error)}"
    except OSError:
        said = b""
    if said.startswith(ALERT) or (not said and not encrypted):
        return f"{address} ends connections without TLS at once: it wants --tls-cert, --tls-key and --tls-ca"
    return "" if said else f"{address} ends the connection: it does not take this process's certificate"


def _words(error: ssl.SSLError) -> str:
    return (error.reason or "no reason given").replace("_", " ").lower()
