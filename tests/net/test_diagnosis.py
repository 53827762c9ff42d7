"""Why a peer cannot be reached, against real servers."""

from __future__ import annotations

import socket
from pathlib import Path

import grpc.aio
import pytest

from outrider.net.diagnosis import why_unreachable
from outrider.net.rpc import bind, new_server
from outrider.net.tls import Tls
from outrider.options.protection import TlsFiles
from tests.certificates import Authority


@pytest.fixture
def authority() -> Authority:
    return Authority()


async def served(tls: Tls | None, mutual: bool = True) -> tuple[grpc.aio.Server, str]:
    server = new_server()
    address = bind(server, "127.0.0.1", 0, tls=tls, mutual=mutual)
    await server.start()
    return server, address


async def test_whoever_can_be_reached_has_nothing_wrong(tmp_path: Path, authority: Authority) -> None:
    for tls in (None, Tls(authority.write(tmp_path))):
        server, address = await served(tls)
        assert await why_unreachable(address, tls) == ""
        await server.stop(None)


async def test_a_port_that_nobody_listens_at_and_a_name_that_nobody_has() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert await why_unreachable(address, None) == f"nothing listens at {address}"
    assert "the name in" in await why_unreachable("no.such.host.invalid:1", None)


@pytest.mark.parametrize(
    "address",
    ["", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:65536", f"127.0.0.1:{2**64}", "\0:1", f"{'a' * 300}:1"],
)
async def test_an_address_that_nobody_can_have(address: str) -> None:
    """A peer may name it."""
    assert address in (why := await why_unreachable(address, None)) and why != address


async def test_one_that_takes_connections_and_says_nothing() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert "says nothing" in await why_unreachable(address, None)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [(("localhost",), "IP address mismatch"), (("127.0.0.1",), "unable to get local issuer certificate")],
)
async def test_a_certificate_that_is_not_good(
    tmp_path: Path, authority: Authority, names: tuple[str, ...], sentence: str
) -> None:
    server, address = await served(Tls(authority.write(tmp_path / "server", *names)))
    mine = authority if "local" not in sentence else Authority("another")
    why = await why_unreachable(address, Tls(mine.write(tmp_path / "peer")))
    assert why.startswith(f"the certificate that {address} shows is not good: ") and sentence in why
    await server.stop(None)


async def test_one_that_does_not_take_ours(tmp_path: Path, authority: Authority) -> None:
    server, address = await served(Tls(authority.write(tmp_path / "server")))
    stranger = Authority("another").write(tmp_path / "stranger")
    both = tmp_path / "both.pem"  # it trusts the server, which does not trust it
    both.write_bytes(authority.pem + stranger.ca.read_bytes())
    why = await why_unreachable(address, Tls(TlsFiles(stranger.cert, stranger.key, both)))
    assert "does not take this process's certificate" in why
    await server.stop(None)


async def test_one_end_with_tls_and_the_other_without(tmp_path: Path, authority: Authority) -> None:
    tls = Tls(authority.write(tmp_path))
    server, address = await served(None)
    assert "speaks no TLS" in await why_unreachable(address, tls)
    await server.stop(None)
    server, address = await served(tls)
    assert "it wants --tls-cert" in await why_unreachable(address, None)
    await server.stop(None)
