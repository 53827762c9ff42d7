from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from outrider.errors import InvalidRequest, OutriderError, Unavailable
from outrider_cli.bench.client import Came, Reply, Request, ServerClient
from outrider_cli.bench.group import ask_together, cpu_clock
from outrider_cli.bench.http import Http
from outrider_cli.bench.run import reach
from outrider_cli.bench.services import EXTRAS
from tests.bench.other_server import other_server

REQUEST = Request("Hello", 8, 0.0, 1)


async def test_an_answer_is_read_with_its_arrivals() -> None:
    with other_server() as (url, asked):
        client = ServerClient(url, "other", {"stream_options": {"include_usage": True}})
        came: list[tuple[float, int | None]] = []
        reply = await client.ask(REQUEST, lambda at, tokens: came.append((at, tokens)))
        assert await client.models() == ["other"]
        await client.close()
    assert reply.text == " 0ab 2ab 4ab 6ab"
    assert [tokens for _, tokens in reply.arrivals] == [2, 2, 2, 2]
    assert sorted(at for at, _ in reply.arrivals) == [at for at, _ in reply.arrivals]
    assert reply.sent <= reply.arrivals[0][0]
    assert came == [(at, None) for at, _ in reply.arrivals], "this server tells its tokens in the end"
    assert (reply.prompt_tokens, reply.tokens, reply.drafted) == (5, 8, 0)
    [body] = asked
    assert (body["model"], body["prompt"], body["max_tokens"], body["seed"]) == ("other", "Hello", 8, 1)


async def test_a_server_that_refuses_our_extras_is_asked_without_them() -> None:
    with other_server() as (url, asked):
        client = await reach(f"{url}/v1/", None)  # as an SDK's base_url, too
        reply = await client.ask(REQUEST)
        await client.close()
    assert reply.tokens == 8
    assert ["ignore_eos" in body for body in asked] == [True, False, False]
    assert asked[-1]["model"] == "other"
    assert asked[0]["stream_options"] == EXTRAS["stream_options"]


async def test_a_server_that_is_not_there_is_one_sentence() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(Unavailable, match=f"no server answers at {url}: start one, or name another by --url"):
        await reach(url, None)
    with pytest.raises(InvalidRequest, match="--url must be http:// or https:// and a host, not nonsense"):
        await reach("nonsense", "m")


class Scripted:
    """Answers each request with so many pieces of two tokens, a turn of the event loop each; 0 = an error."""

    def __init__(self, *pieces: int) -> None:
        self._pieces = pieces
        self.asked: list[int] = []
        self.cut_off = 0

    async def ask(self, request: Request, came: Came | None = None) -> Reply:
        assert came is not None
        self.asked.append(request.seed)
        try:
            for _ in range(self._pieces[request.seed]):
                await asyncio.sleep(0)
                came(1.0, 2)
        except asyncio.CancelledError:
            self.cut_off += 1
            raise
        if not self._pieces[request.seed]:
            raise OutriderError("no")
        return Reply(0.0, [(1.0, 2)] * self._pieces[request.seed])


def seeded(*seeds: int) -> list[Request]:
    return [replace(REQUEST, seed=seed) for seed in seeds]


async def test_a_stream_whose_answer_is_complete_asks_on_until_all_are() -> None:
    readings = iter(range(10))
    server = Scripted(1, 10, 4)
    found = await ask_together(server, seeded(0, 1, 2), lambda: {"target": float(next(readings))})
    assert [len(reply.arrivals) for reply in found.replies] == [1, 10, 4]
    assert server.asked[:5] == [0, 1, 2, 0, 1], "the same requests, in their order"
    assert server.cut_off and len(found.further) >= 10
    assert found.cpu_seconds == {"target": 1.0}, "read when all had begun and when all were complete"


async def test_a_failure_is_raised_and_the_others_are_cut_off() -> None:
    server = Scripted(5, 0)
    with pytest.raises(OutriderError, match="no"):
        await ask_together(server, seeded(0, 1, 0), dict)
    assert server.cut_off == 2


def test_the_processor_time_of_a_process_is_its_own() -> None:
    before = time.process_time()
    read = cpu_clock(os.getpid())
    assert before <= read <= time.process_time()
    with pytest.raises(OSError):
        cpu_clock(2**22 + 1)  # above the largest number that a process gets


async def test_an_error_of_the_server_is_told_in_its_words() -> None:
    with other_server() as (url, _):
        client = ServerClient(url, "other", {"top_q": 1})
        with pytest.raises(InvalidRequest, match="Unrecognized request argument: top_q"):
            await client.ask(REQUEST)
        await client.close()


@asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[tuple[str, list[int]]]:
    """A server that gives these answers in turn, in pieces of three bytes; its address, and the number of
    answers that each connection has had."""
    left, connections = list(answers), list[int]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(0)
        own = len(connections) - 1
        with suppress(asyncio.IncompleteReadError):
            while left:
                await reader.readuntil(b"\r\n\r\n")
                answer = left.pop(0)
                connections[own] += 1
                for at in range(0, len(answer), 3):
                    writer.write(answer[at : at + 3])
                    await writer.drain()
                if b"content-length" not in answer and b"chunked" not in answer:
                    break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connections


async def test_a_body_is_read_however_it_comes() -> None:
    """Chunked, with lines longer than a chunk; of a known length; and until the connection's end."""
    head = b"HTTP/1.1 200 OK\r\n"
    answers = (
        head + b"Transfer-Encoding: chunked\r\n\r\n4\r\nab\nc\r\n3;x=y\r\nd\r\n\r\n0\r\n\r\n",
        head + b"content-length: 5\r\n\r\nab\ncd",
        head + b"\r\nab\ncd\n",
    )
    async with answering(*answers) as (url, connections):
        http = Http(url)
        for _ in answers:
            async with http.asked("GET", "/") as response:
                assert [line async for line in response.lines()] == [b"ab", b"cd"]
        await http.close()
    assert connections == [3], "one connection serves them all"


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nab", b"SSH-2.0\r\n\r\n"]
)
async def test_an_answer_that_breaks_off_is_one_sentence(answer: bytes) -> None:
    async with answering(answer) as (url, _):
        client = ServerClient(url, None, {})
        with pytest.raises(Unavailable, match="broke before the answer was complete"):
            await client.models()
        await client.close()
