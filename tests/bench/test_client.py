from __future__ import annotations

import asyncio
import os
import socket
import time

import pytest

from outrider.bench.client import Reply, Request, ServerClient, Watch
from outrider.bench.group import Window, ask_together, cpu_clock
from outrider.bench.run import reach
from outrider.bench.services import EXTRAS
from outrider.errors import InvalidRequest, OutriderError, Unavailable
from tests.bench.other_server import other_server

REQUEST = Request("Hello", 8, 0.0, 1)


async def test_an_answer_is_read_with_its_arrivals() -> None:
    with other_server() as (url, asked):
        client = ServerClient(url, "other", {"stream_options": {"include_usage": True}})
        reply = await client.ask(REQUEST)
        assert await client.models() == ["other"]
        await client.close()
    assert reply.text == " 0ab 2ab 4ab 6ab"
    assert [tokens for _, tokens in reply.arrivals] == [2, 2, 2, 2]
    assert sorted(at for at, _ in reply.arrivals) == [at for at, _ in reply.arrivals]
    assert reply.sent <= reply.arrivals[0][0]
    assert (reply.prompt_tokens, reply.tokens, reply.drafted) == (5, 8, 0)
    [body] = asked
    assert (body["model"], body["prompt"], body["max_tokens"], body["seed"]) == ("other", "Hello", 8, 1)


async def test_a_server_that_refuses_our_extras_is_asked_without_them() -> None:
    with other_server() as (url, asked):
        client = await reach(url, None)
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
    with pytest.raises(Unavailable, match="no server answers"):
        await reach("nonsense", "m")


class Scripted:
    """Answers as a test says, one request after another."""

    def __init__(self, *steps: str) -> None:
        self._steps = list(steps)

    async def ask(self, request: Request, watch: Watch | None = None) -> Reply:
        assert watch is not None
        for step in self._steps:
            await asyncio.sleep(0)
            if step == "fail":
                raise OutriderError("no")
            getattr(watch, step)()
        return Reply(0.0, [(1.0, 1)])


async def test_the_clock_is_read_while_all_streams_run() -> None:
    readings = iter(range(10))
    window = Window(2, lambda: {"target": float(next(readings))})
    window.began()
    assert next(readings) == 0
    window.began()  # reads 1
    next(readings)
    window.ended()  # reads 3
    window.ended()
    assert window.cpu_seconds == {"target": 2.0}
    assert next(readings) == 4


async def test_streams_that_never_ran_together_have_no_window() -> None:
    window = Window(2, lambda: {"target": 0.0})
    for happens in (window.began, window.ended, window.began, window.ended):
        happens()
    assert window.cpu_seconds is None


async def test_a_group_is_asked_together_and_a_failure_is_raised() -> None:
    replies, cpu = await ask_together(Scripted("began", "ended"), [REQUEST] * 3, lambda: {"target": 1.0})
    assert len(replies) == 3
    assert cpu == {"target": 0.0}
    with pytest.raises(OutriderError, match="no"):
        await ask_together(Scripted("began", "fail"), [REQUEST] * 3, dict)


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
