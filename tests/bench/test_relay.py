"""The line holds bytes back in order and in parallel, and gRPC really goes through it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from outrider_cli.bench.relay import Relay

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def relay() -> AsyncIterator[Relay]:
    running = Relay()
    await running.start()
    yield running
    await running.close()


class Echo:
    """A server that sends back what it gets, and closes when its peer does."""

    def __init__(self) -> None:
        self.address = ""
        self.ended = asyncio.Event()  # of some connection

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        self.ended.set()
        writer.close()


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    running = Echo()
    server = await asyncio.start_server(running.answer, "127.0.0.1", 0)
    running.address = "{}:{}".format(*server.sockets[0].getsockname())
    yield running
    server.close()


async def connect(relay: Relay, request: str) -> tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = relay.environment["GRPC_ADDRESS_HTTP_PROXY"].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request.encode())
    status = await reader.readuntil(b"\r\n\r\n")
    return status.split(b"\r\n")[0], reader, writer


@pytest.mark.parametrize("rtt_seconds", [0.0, 0.02])
async def test_bytes_pass_in_order_both_ways(relay: Relay, echo: Echo, rtt_seconds: float) -> None:
    relay.rtt_seconds = rtt_seconds
    status, reader, writer = await connect(
        relay, f"CONNECT {echo.address} HTTP/1.1\r\nHost: {echo.address}\r\n\r\n"
    )
    assert status.endswith(b"200 Connection established")
    sent = [b"%05d" % number for number in range(200)]
    for piece in sent:
        writer.write(piece)
        await asyncio.sleep(0)
    assert await reader.readexactly(1000) == b"".join(sent)
    assert relay.carried_bytes == 2000
    writer.write_eof()
    async with asyncio.timeout(120):
        await echo.ended.wait()  # the end passes too
    writer.close()


async def carried(relay: Relay, count: int) -> None:
    async with asyncio.timeout(120):
        while relay.carried_bytes < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_what_is_under_way_holds_up_nothing_that_follows(relay: Relay, echo: Echo) -> None:
    _, reader, writer = await connect(relay, f"CONNECT {echo.address} HTTP/1.1\r\n\r\n")
    relay.rtt_seconds = 600.0
    for number in range(3):
        writer.write(b"late")
        await carried(relay, 4 * (number + 1))  # read while the one before is on its way there
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.2)
    assert relay.carried_bytes == 12, "something came back"
    relay.rtt_seconds = 0.0
    _, other_reader, other = await connect(relay, f"CONNECT {echo.address} HTTP/1.1\r\n\r\n")
    other.write(b"soon")
    assert await other_reader.readexactly(4) == b"soon"  # another connection is not held up
    writer.close()
    other.close()


async def test_nothing_overtakes_if_the_line_gets_shorter(relay: Relay, echo: Echo) -> None:
    _, reader, writer = await connect(relay, f"CONNECT {echo.address} HTTP/1.1\r\n\r\n")
    relay.rtt_seconds = 0.6
    writer.write(b"long")
    await carried(relay, 4)
    relay.rtt_seconds = 0.0
    writer.write(b"short")
    assert await reader.readexactly(9) == b"longshort"
    writer.close()


@pytest.mark.parametrize(
    "request_line", ["CONNECT 127.0.0.1:1 HTTP/1.1", "GET / HTTP/1.1", "CONNECT x HTTP/1.1"]
)
async def test_what_cannot_be_connected_is_refused(relay: Relay, request_line: str) -> None:
    status, reader, writer = await connect(relay, f"{request_line}\r\n\r\n")
    assert b"502" in status
    assert await reader.read() == b""
    writer.close()


async def test_a_grpc_process_with_the_environment_goes_through_the_line(relay: Relay) -> None:
    """And one without it does not: both ask the same server, over the channel that the roles use."""
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc

    from outrider.net.rpc import bind, new_server

    server = new_server()
    servicer = health.aio.HealthServicer()
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    program = (
        "import asyncio\nfrom grpc_health.v1 import health_pb2, health_pb2_grpc\n"
        "from outrider.net.rpc import channel\n"
        "async def ask():\n"
        f"    async with channel('{address}') as connection:\n"
        "        stub = health_pb2_grpc.HealthStub(connection)\n"
        "        print((await stub.Check(health_pb2.HealthCheckRequest())).status)\n"
        "asyncio.run(ask())"
    )

    async def ask(environment: dict[str, str]) -> bytes:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            program,
            env={**os.environ, **environment},
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
        )
        return (await process.communicate())[0]

    try:
        assert await ask({}) == b"1\n"
        assert relay.carried_bytes == 0
        assert await ask(relay.environment) == b"1\n"
        assert relay.carried_bytes > 100
    finally:
        await server.stop(0)
