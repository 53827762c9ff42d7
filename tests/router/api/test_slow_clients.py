"""Clients that do not read: what waits for them is bounded, and nobody else waits."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
import uvicorn

from router.api.http import create_app
from router.api.intake import Intake
from router.metrics import Metrics
from router.requests import GenerationRequest, SessionEvent
from tests.router.api.scripted import ScriptedRunner, byte_level, served, steps, until

TOKENIZER = byte_level()
MODEL = served(TOKENIZER)
BUFFER = 4096  # bytes that the kernel keeps, for either side
LONG, SHORT = 20_000, 400  # events of an answer
MOST_WAITING = 1000  # events: what fits into the buffers of kernel and server


@pytest.fixture
async def server(metrics: Metrics) -> AsyncIterator[tuple[ScriptedRunner, int]]:
    """Answers are long, but for a prompt of one token; and the port."""
    word = TOKENIZER.encode(" the", add_special_tokens=False).ids[0]

    def script(request: GenerationRequest) -> list[SessionEvent]:
        return steps([word] * (LONG if len(request.params.prompt) > 1 else SHORT))

    runner = ScriptedRunner(MODEL, script)
    app = create_app(Intake(runner, lambda limit: 1), metrics)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)  # connections have it from there
    running = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    task = asyncio.create_task(running.serve(sockets=[listener]))
    await until(lambda: running.started)
    yield runner, listener.getsockname()[1]
    running.should_exit = True
    await task


async def not_reading(port: int) -> socket.socket:
    """A client that has asked, and reads nothing of the answer."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, ("127.0.0.1", port))
    body = json.dumps({"prompt": [5, 6], "max_tokens": 50, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    await loop.sock_sendall(connection, (head + body).encode())
    return connection


def told(runner: ScriptedRunner) -> list[int]:
    """Returns how many events were taken from each session, in the order in which they were asked for."""
    return [len(log.events) for log in runner.logs.values()]


async def test_a_client_that_does_not_read_holds_up_its_own_answer_alone(
    server: tuple[ScriptedRunner, int],
) -> None:
    runner, port = server
    idle = [await not_reading(port) for _ in range(4)]
    await until(lambda: len(told(runner)) == 4 and min(told(runner)) > 0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        for _ in range(3):  # others get all of theirs meanwhile
            body = {"prompt": [5], "max_tokens": 50, "stream": True}
            reply = await client.post("/v1/completions", json=body)
            assert reply.status_code == 200 and reply.text.endswith("data: [DONE]\n\n")
    assert max(told(runner)[:4]) < MOST_WAITING
    assert runner.open == 4
    for connection in idle:
        connection.close()
    await until(lambda: runner.open == 0)
    assert max(told(runner)[:4]) < MOST_WAITING
