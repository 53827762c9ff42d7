"""Credentials of real servers and channels, and files that change under them."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.errors import StartupError
from outrider.net.rpc import bind, channel, new_server
from outrider.net.tls import Tls, TlsFiles
from outrider.v1 import common_pb2, verifier_pb2, verifier_pb2_grpc
from tests.certificates import Authority, serial


class Worker(verifier_pb2_grpc.VerifierServicer):
    """Answers every message of a stream."""

    async def GetInfo(self, request: Any, context: Any) -> common_pb2.WorkerInfo:
        return common_pb2.WorkerInfo()

    async def Sessions(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for _ in request_iterator:
            yield verifier_pb2.VerifierEvents()


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
async def serving() -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """Starts a server with these files; gives its address."""
    servers = []

    async def start(tls: Tls, mutual: bool = True) -> str:
        server = new_server()
        verifier_pb2_grpc.add_VerifierServicer_to_server(Worker(), server)
        address = bind(server, "127.0.0.1", 0, tls=tls, mutual=mutual)
        await server.start()
        servers.append(server)
        return address

    yield start
    for server in servers:
        await server.stop(None)


async def ask(connection: grpc.aio.Channel) -> grpc.StatusCode:
    try:
        await verifier_pb2_grpc.VerifierStub(connection).GetInfo(common_pb2.GetInfoRequest(), timeout=120)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def asked(address: str, tls: Tls | None) -> grpc.StatusCode:
    async with channel(address, tls) as connection:
        return await ask(connection)


async def shown(address: str) -> int:
    """The serial number of the certificate that a server shows now."""
    host, _, port = address.rpartition(":")
    return serial(await asyncio.to_thread(ssl.get_server_certificate, (host, int(port))))


def put(files: TlsFiles, pair: tuple[bytes, bytes]) -> None:
    """Replaces each file as a whole, as a renewal does."""
    for file, content in zip((files.key, files.cert), reversed(pair), strict=True):
        fresh = file.with_suffix(".new")
        fresh.write_bytes(content)
        fresh.rename(file)


async def test_peers_of_one_authority_talk_and_nobody_else_does(
    tmp_path: Path, authority: Authority, serving: Any
) -> None:
    address = await serving(Tls(authority.write(tmp_path / "server")))
    stranger = Authority("another").write(tmp_path / "stranger")
    gullible = Authority("another").write(tmp_path / "gullible")
    assert await asked(address, Tls(authority.write(tmp_path / "peer"))) is grpc.StatusCode.OK
    assert await asked(address, Tls(stranger)) is grpc.StatusCode.UNAVAILABLE
    assert await asked(address, Tls(gullible)) is grpc.StatusCode.UNAVAILABLE
    assert await asked(address, None) is grpc.StatusCode.UNAVAILABLE
    none_shown = grpc.ssl_channel_credentials(authority.pem)
    unsigned = grpc.ssl_channel_credentials(
        authority.pem, stranger.key.read_bytes(), stranger.cert.read_bytes()
    )
    for trusting in (none_shown, unsigned):
        async with grpc.aio.secure_channel(address, trusting) as connection:
            assert await ask(connection) is grpc.StatusCode.UNAVAILABLE


async def test_a_client_needs_no_certificate_where_none_is_asked_for(
    tmp_path: Path, authority: Authority, serving: Any
) -> None:
    address = await serving(Tls(authority.write(tmp_path)), mutual=False)
    async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(authority.pem)) as connection:
        assert await ask(connection) is grpc.StatusCode.OK
    stranger = grpc.ssl_channel_credentials(Authority("another").pem)
    async with grpc.aio.secure_channel(address, stranger) as connection:
        assert await ask(connection) is grpc.StatusCode.UNAVAILABLE


async def test_a_certificate_is_good_for_the_names_and_addresses_in_it(
    tmp_path: Path, authority: Authority, serving: Any
) -> None:
    peer = Tls(authority.write(tmp_path / "peer"))
    elsewhere = await serving(Tls(authority.write(tmp_path / "elsewhere", "10.0.0.1", "example.org")))
    assert await asked(elsewhere, peer) is grpc.StatusCode.UNAVAILABLE
    named = await serving(Tls(authority.write(tmp_path / "named", "localhost")))
    assert await asked(named, peer) is grpc.StatusCode.UNAVAILABLE
    assert await asked(named.replace("127.0.0.1", "localhost"), peer) is grpc.StatusCode.OK


async def test_a_renewal_is_shown_to_new_connections_while_a_stream_goes_on(
    tmp_path: Path, authority: Authority, serving: Any
) -> None:
    files = authority.write(tmp_path / "server")
    address = await serving(Tls(files), mutual=False)
    first = await shown(address)
    peer = Tls(authority.write(tmp_path / "peer"))
    async with channel(address, peer) as connection:
        stream = verifier_pb2_grpc.VerifierStub(connection).Sessions()
        await stream.write(verifier_pb2.VerifierCommand())
        assert await stream.read() is not grpc.aio.EOF
        put(files, authority.pair("127.0.0.1"))
        second = await shown(address)
        assert second == serial(files.cert.read_bytes()) != first
        await stream.write(verifier_pb2.VerifierCommand())
        assert await stream.read() is not grpc.aio.EOF
        await stream.done_writing()
    assert await asked(address, peer) is grpc.StatusCode.OK


async def test_an_authority_is_exchanged_on_both_sides_without_a_restart(
    tmp_path: Path, authority: Authority, serving: Any
) -> None:
    files = {name: authority.write(tmp_path / name) for name in ("server", "peer")}
    server, peer = Tls(files["server"]), Tls(files["peer"])
    address = await serving(server)
    assert await asked(address, peer) is grpc.StatusCode.OK
    successor = Authority("successor")
    successor.write(tmp_path / "server")
    assert await asked(address, peer) is grpc.StatusCode.UNAVAILABLE
    successor.write(tmp_path / "peer")
    assert await asked(address, peer) is grpc.StatusCode.OK


async def test_files_that_do_not_go_together_leave_the_former_in_force_and_are_logged_once(
    tmp_path: Path, authority: Authority, serving: Any, caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.write(tmp_path)
    address = await serving(Tls(files), mutual=False)
    first = await shown(address)
    cert, key = authority.pair("127.0.0.1")
    files.cert.write_bytes(cert)
    assert [await shown(address) for _ in range(3)] == [first] * 3
    files.key.write_bytes(key[:40])
    assert await shown(address) == first
    files.key.unlink()
    assert await shown(address) == first
    complaints = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len(complaints) == 3, complaints
    assert "is not the key of the certificate" in complaints[0]
    assert "no such file" in complaints[2]
    files.key.write_bytes(key)
    assert await shown(address) == serial(cert)


@pytest.mark.parametrize(
    ("breakage", "sentence"),
    [
        (lambda files, other: files.key.unlink(), "key.pem: no such file"),
        (lambda files, other: files.cert.write_text("certificate"), "cert.pem or .*key.pem: "),
        (lambda files, other: files.ca.write_text("authority"), "ca.pem: no certificate in PEM"),
        (lambda files, other: files.key.write_bytes(other.pair("a")[1]), "is not the key of the certificate"),
        (lambda files, other: put(files, other.pair("a", password=b"p")), "the key is encrypted"),
        (
            lambda files, other: put(files, other.pair("a", days=(-2, -1))),
            "cert.pem: certificate has expired",
        ),
        (
            lambda files, other: put(files, other.pair("a", days=(1, 2))),
            "cert.pem: certificate is not yet valid",
        ),
        (lambda files, other: put(files, Authority("b").pair("a")), "cert.pem: .*local issuer certificate"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(
    tmp_path: Path, authority: Authority, breakage: Any, sentence: str
) -> None:
    files = authority.write(tmp_path)
    breakage(files, authority)
    with pytest.raises(StartupError, match=f"the TLS files cannot be used: .*{sentence}"):
        Tls(files)


@pytest.mark.parametrize("days", [(-1, 1), (-2, -1)])
def test_without_an_authority_only_the_time_of_a_certificate_counts(
    tmp_path: Path, authority: Authority, days: tuple[int, int]
) -> None:
    files = authority.write(tmp_path)
    cert, key = authority.pair("a", days=days)
    put(files, ("Subject: O = Größe\n".encode() + cert, key))
    with nullcontext() if days[1] > 0 else pytest.raises(StartupError, match="has expired"):
        Tls(TlsFiles(files.cert, files.key))


async def test_one_certificate_fits_all_names_of_a_domain(
    tmp_path: Path, authority: Authority, serving: Any
) -> None:
    """Kubernetes' pods have such names: 10-0-0-1.outrider.pod.cluster.local."""
    address = await serving(Tls(authority.write(tmp_path, "*.outrider.pod.cluster.local")), mutual=False)
    credentials = grpc.ssl_channel_credentials(authority.pem)
    for name, code in {
        "10-0-0-1.outrider.pod.cluster.local": grpc.StatusCode.OK,
        "10-0-0-1.other.pod.cluster.local": grpc.StatusCode.UNAVAILABLE,
        "a.b.outrider.pod.cluster.local": grpc.StatusCode.UNAVAILABLE,
    }.items():
        called = [("grpc.ssl_target_name_override", name)]  # in the place of a DNS that knows it
        async with grpc.aio.secure_channel(address, credentials, options=called) as connection:
            assert await ask(connection) is code, name


@pytest.mark.parametrize(
    ("named", "role", "code"),
    [
        ((), "router", grpc.StatusCode.OK),
        (("outrider:router",), "router", grpc.StatusCode.OK),
        (("outrider:drafter", "outrider:router"), "router", grpc.StatusCode.OK),
        (("outrider:drafter",), "router", grpc.StatusCode.FAILED_PRECONDITION),
        (("outrider:drafter",), "anybody", grpc.StatusCode.OK),
    ],
)
async def test_a_certificate_that_names_roles_is_good_for_these_only(
    named: tuple[str, ...],
    role: str,
    code: grpc.StatusCode,
    tmp_path: Path,
    authority: Authority,
    serving: Any,
) -> None:
    address = await serving(Tls(authority.write(tmp_path / "server")))
    peer = Tls(authority.write(tmp_path / "peer", "127.0.0.1", *named))
    async with channel(address, peer) as connection:
        if role == "anybody":
            assert await ask(connection) is code
            return
        commands = iter([verifier_pb2.VerifierCommand()])  # sent by gRPC: the refusal may come before it
        stream = verifier_pb2_grpc.VerifierStub(connection).Sessions(commands, timeout=120)
        if code is grpc.StatusCode.OK:
            assert await stream.read() is not grpc.aio.EOF
        assert await stream.code() is code
        if code is not grpc.StatusCode.OK:
            assert "this is for a router; the caller's certificate is a drafter's" in await stream.details()
