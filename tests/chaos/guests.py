"""Guests that a storm has all the time: they try to stop, slow or mislead the service, each in its way.

They end with SIGTERM and write what each did, and what it should not have been answered.

    python -m tests.chaos.guests OPTIONS.json RESULT.json
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc.aio
import httpx

from outrider.net.rpc import channel
from outrider.v1 import common_pb2, registry_pb2

PAUSE_SECONDS = 0.5  # between two attempts of one guest
WAIT_SECONDS = 20.0  # for an answer; a router that is frozen gives none
IDLE_CONNECTIONS = 100  # that one guest holds at each router
HOP_SECONDS = 0.05  # at most, from a stream's first event to its end
HOPS = 6  # of one stream
GET_INFO = "/outrider.v1.Verifier/GetInfo"
LEAVE = "/outrider.v1.Registry/Leave"

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class GuestOptions:
    urls: list[str]
    grpc_addresses: list[str]  # of the routers, in the same order
    verifiers: list[str]  # addresses
    seed: int


@dataclass
class Visit:
    """What the guests did."""

    attempts: dict[str, int] = field(default_factory=dict)  # by guest and answer
    errors: list[str] = field(default_factory=list)  # answers that nobody may get

    def count(self, what: str) -> None:
        self.attempts[what] = self.attempts.get(what, 0) + 1


def bodies() -> list[bytes]:
    """Returns requests that cost much where they are not refused early; none of them is legal."""
    return [
        json.dumps({"prompt": ["a"] * 128, "stop": ["x" * 2**20] * 3}).encode(),
        b'{"messages":[' + b"{}," * 300_000 + b"{}]}",
        b'{"prompt":[' + b"0," * 1_000_000 + b"0]}",
        json.dumps({"prompt": "word " * 200_000}).encode(),
        json.dumps({"prompt": "a", "logit_bias": {str(each): 1 for each in range(3000)}}).encode(),
        json.dumps({"prompt": "a", "repetition_penalty": 1e-40}).encode(),
        b"[" * 1_000_000,
    ]


async def flood(options: GuestOptions, visit: Visit, rng: random.Random) -> None:
    """A client whose requests are as large as they come, and whose connections say nothing or half of it."""
    made = bodies()
    idle: list[Connection] = []
    async with httpx.AsyncClient(timeout=WAIT_SECONDS) as client:
        try:
            while True:
                router = rng.randrange(len(options.urls))
                body = rng.choice(made)
                path = "/v1/chat/completions" if b"messages" in body[:20] else "/v1/completions"
                try:
                    answer = await client.post(options.urls[router] + path, content=body)
                    visit.count(f"flood {answer.status_code}")
                    if not (400 <= answer.status_code < 500 or answer.status_code == 503):
                        visit.errors.append(f"flood: {answer.status_code} {answer.text[:300]}")
                except httpx.TransportError as error:
                    visit.count(f"flood {type(error).__name__}")
                idle = await _held(options.urls[router], idle)
                await asyncio.sleep(PAUSE_SECONDS)
        finally:
            for _, writer in idle:
                writer.close()


async def _held(url: str, idle: list[Connection]) -> list[Connection]:
    """Opens a few connections more; returns those that are open."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    over = [each for each in idle if each[0].at_eof() or each[1].is_closing()]
    for _, writer in over:
        writer.close()
    idle = [each for each in idle if each not in over]
    for number in range(min(10, 2 * IDLE_CONNECTIONS - len(idle))):
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(2.0):
                opened = await asyncio.open_connection(host, int(port))
            idle.append(opened)
            if number % 2:
                opened[1].write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{")
    return idle


async def hop(options: GuestOptions, visit: Visit, rng: random.Random) -> None:
    """A client that leaves its stream at once and resumes it at once, here or at the other router."""
    request = {"prompt": "def ", "max_tokens": 64, "temperature": 0, "stream": True}
    async with httpx.AsyncClient(timeout=WAIT_SECONDS) as client:
        while True:
            headers: dict[str, str] = {}
            for _ in range(HOPS):
                url = rng.choice(options.urls) + "/v1/completions"
                try:
                    async with client.stream("POST", url, json=request, headers=headers) as answer:
                        if answer.status_code >= 500 and answer.status_code != 503:
                            text = (await answer.aread()).decode(errors="replace")
                            visit.errors.append(f"hop: {answer.status_code} {text[:300]}")
                        visit.count(f"hop {answer.status_code}")
                        if answer.status_code >= 400:
                            break
                        async for line in answer.aiter_lines():
                            if line.startswith("id: "):
                                headers = {"Last-Event-ID": line[4:]}
                            if "lost track" in line:
                                visit.errors.append(f"hop: {line[:300]}")
                            if headers:
                                break
                        await asyncio.sleep(rng.uniform(0.0, HOP_SECONDS))
                except httpx.TransportError as error:
                    visit.count(f"hop {type(error).__name__}")
            await asyncio.sleep(PAUSE_SECONDS)


async def lie(options: GuestOptions, visit: Visit, rng: random.Random) -> None:
    """Something that takes its leave in the name of verifiers that are there."""
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with channel(rng.choice(options.verifiers)) as worker:
                ask = worker.unary_unary(
                    GET_INFO,
                    request_serializer=common_pb2.GetInfoRequest.SerializeToString,
                    response_deserializer=common_pb2.WorkerInfo.FromString,
                )
                hello = (await ask(common_pb2.GetInfoRequest(), timeout=WAIT_SECONDS)).hello
            hello.incarnation ^= 1
            hello.role = rng.choice([common_pb2.ROLE_VERIFIER, common_pb2.ROLE_DRAFTER])
            async with channel(rng.choice(options.grpc_addresses)) as router:
                leave = router.unary_unary(
                    LEAVE,
                    request_serializer=registry_pb2.LeaveRequest.SerializeToString,
                    response_deserializer=registry_pb2.LeaveReply.FromString,
                )
                visit.count("lie")
                await leave(registry_pb2.LeaveRequest(hello=hello), timeout=WAIT_SECONDS)
        await asyncio.sleep(PAUSE_SECONDS)


GUESTS: tuple[Callable[[GuestOptions, Visit, random.Random], Awaitable[None]], ...] = (flood, hop, lie)


async def main(options_file: str, result_file: str) -> None:
    options = GuestOptions(**json.loads(Path(options_file).read_text()))  # noqa: ASYNC240
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    visit = Visit()
    rng = random.Random(options.seed)
    tasks = [asyncio.create_task(guest(options, visit, rng)) for guest in GUESTS]  # type: ignore[arg-type]
    print("guests are in", flush=True)
    await stop.wait()
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            visit.errors.append(f"a guest failed: {result!r}")
    Path(result_file).write_text(json.dumps(asdict(visit)))  # noqa: ASYNC240


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
