"""A drafter that joined by a network that comes and goes: the text is the target's own, and it drafts on."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from outrider.net.tasks import cancel
from outrider.sampling.params import SamplingParams
from tests.in_process import Cluster
from tests.tiny_models import build

OUTPUT = 60


class Network:
    """All that a drafter reaches, it reaches through here, by TCP. `leave` breaks what stands and lets
    nothing through; `come_back` lets it through again."""

    def __init__(self) -> None:
        self._there = True
        self._lines: list[asyncio.StreamWriter] = []
        self._servers: list[asyncio.Server] = []
        self.lines = 0  # that were ever let through

    async def way_to(self, address: str) -> str:
        host, _, port = address.rpartition(":")

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if not self._there:
                writer.transport.abort()
                return
            self.lines += 1
            there, away = await asyncio.open_connection(host, int(port))
            self._lines += [writer, away]
            ways = [asyncio.create_task(_pass(*each)) for each in ((reader, away), (there, writer))]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            await cancel(ways)
            for each in (writer, away):
                each.transport.abort()

        server = await asyncio.start_server(carry, "127.0.0.1", 0)
        self._servers.append(server)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def leave(self) -> None:
        self._there = False
        for line in self._lines:
            line.transport.abort()
        self._lines.clear()

    def come_back(self) -> None:
        self._there = True

    def close(self) -> None:
        self.leave()
        for server in self._servers:
            server.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()


async def test_a_change_of_network_costs_drafts_and_no_token(tmp_path: Path) -> None:
    target = build("llama", tmp_path / "target")
    network = Network()
    samplings = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=7)
    async with Cluster(target) as cluster:
        (verifier,) = cluster.fleet.verifiers.values()
        way = await network.way_to(verifier.registration.address)
        verifier.registration = replace(verifier.registration, join_address=way)
        expected = [await cluster.ask([5, 6, 7], each, OUTPUT) for each in samplings]
        assert all(answer.verified == 0 for answer in expected)
        await cluster.add_joined_drafter(target, f"http://{await network.way_to(cluster.router_address)}")

        async def leave(tokens: list[int]) -> None:
            if len(tokens) >= OUTPUT // 4:
                network.leave()

        for sampling, alone in zip(samplings, expected, strict=True):
            accepted = 0
            while not accepted:  # it may have just come back
                answer = await cluster.ask([5, 6, 7], sampling, OUTPUT)
                assert answer.tokens == alone.tokens
                accepted = answer.accepted
            lines = network.lines
            answer = await cluster.ask([5, 6, 7], sampling, OUTPUT, on_tokens=leave)
            assert answer.tokens == alone.tokens
            while cluster.fleet.drafters:  # noqa: ASYNC110 (plain state)
                await asyncio.sleep(0.01)
            network.come_back()
            while not cluster.fleet.drafters:  # noqa: ASYNC110 (plain state)
                await asyncio.sleep(0.01)
            assert network.lines > lines
        network.close()
