"""`outrider doctor`: checks a machine, or a running service, before it is needed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider_cli.generate import ApiKey
from outrider_cli.reporting import FAILED, reported
from outrider_cli.roles import STORE

if TYPE_CHECKING:
    from outrider.options.protection import TlsFiles
    from outrider_cli.doctor.finding import Finding

PORTS = (8000, 50051)  # of a router, by default


def doctor(
    url: Annotated[
        str | None,
        typer.Option(
            help="Address of a running router's HTTP API: it is looked at, too.", show_default="none"
        ),
    ] = None,
    api_key: ApiKey = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Store that routers are to share: redis://HOST:PORT, rediss:// for TLS.",
            show_default=f"${STORE}, or none",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            max=65535,
            help="Port that is to be free; may be repeated.",
            show_default="8000 and 50051; with --url none",
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST", help="Host by which others reach it: the certificate's.", show_default="none"
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Device that models are to run on: cpu, cuda.", show_default="cuda if there is one"
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate (PEM) to show.", show_default="none")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Private key of it (PEM).", show_default="none")
    ] = None,
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Authority (PEM) of its peers' certificates, and of that of --url.",
            show_default="none",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object of JSON.")] = False,
) -> None:
    """Check what Outrider needs: a line each that says ok, or what is wrong and what to do. Ends with 1 if
    anything is wrong."""
    from outrider.options.protection import Protection

    with reported("doctor"):
        own_ca = None if url is not None and tls_cert is None and tls_key is None else tls_ca
        files = Protection(tls_cert, tls_key, own_ca).tls
        found: list[Finding] = []

        def checks() -> Iterator[list[Finding]]:
            yield from _machine(device)
            yield from _ports(host, port or ([] if url else list(PORTS)))
            if files is not None:
                yield _certificates(files, advertise)
            if address := store or os.environ.get(STORE):
                yield _store(address)
            if url is not None:
                yield _service(url.rstrip("/"), api_key, tls_ca)

        for some in checks():
            found += some
            if not as_json:
                for each in some:
                    print(each, flush=True)
        right = all(each.ok for each in found)
        if as_json:
            told = [
                {"check": each.check, "ok": each.ok, "said": each.said, "todo": each.todo} for each in found
            ]
            print(json.dumps({"ok": right, "findings": told}, indent=1))
    if not right:
        raise typer.Exit(FAILED)


def _machine(device: str | None) -> Iterator[list[Finding]]:
    from outrider_cli.doctor import versions

    python, packages = versions.asked_for()
    yield [versions.python(python)]
    fits = versions.packages(packages)
    yield fits
    if not all(each.ok for each in fits):
        return  # what follows needs them

    from outrider_cli.doctor import devices, processor

    yield [processor.cores()]
    yield [processor.vector_units()]
    yield [processor.native_code()]
    yield devices.gpus()
    yield devices.engine(device or devices.best())


def _ports(host: str, ports: list[int]) -> Iterator[list[Finding]]:
    from outrider_cli.doctor.ports import port

    yield [port(host, number) for number in ports]


def _certificates(files: TlsFiles, advertise: str | None) -> list[Finding]:
    from outrider_cli.doctor.certificates import certificates

    return certificates(files, [advertise] if advertise else [], time.time())


def _store(url: str) -> list[Finding]:
    from outrider_cli.doctor.store import store

    return store(url, time.time)


def _service(url: str, api_key: str | None, ca_file: Path | None) -> list[Finding]:
    from outrider.client.connection import http_client
    from outrider.client.live import SILENCE_SECONDS
    from outrider_cli.doctor.service import service

    with http_client(api_key, ca_file, SILENCE_SECONDS) as http:
        return service(http, url, time.time)
