"""The router as a process: it says when it is ready, answers, and stops when told to."""

import asyncio
import dataclasses
import json
import os
import re
import signal
import socket
import sys
import urllib.error
import urllib.request
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from typing import Any

import pytest
import tokenizers
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import decoders, models

from outrider.errors import StartupError
from outrider.net.rpc import channel
from outrider.options.option import build
from outrider.v1 import generation_pb2, generation_pb2_grpc, verifier_pb2
from outrider.wire.description import TokenizerFiles
from outrider.wire.hello import Role
from router.config import RouterConfig
from router.service import listen
from tests.redis_server import RedisServer

pytestmark = pytest.mark.process

PROGRAM = """
import asyncio, sys
from outrider.errors import StartupError
from outrider.options.sessions import SessionOptions
from router.config import RouterConfig
from router.service import serve
port, grpc_port = map(int, sys.argv[1:3])
try:
    asyncio.run(serve(RouterConfig(port=port, grpc_port=grpc_port, sessions=SessionOptions(seed=7))))
except StartupError as error:
    sys.exit(error.message)
"""


def letters(like: TokenizerFiles) -> TokenizerFiles:
    """A real tokenizer.json of letters, after four tokens that end texts: token id 4 is "a"."""
    vocabulary = {token: index for index, token in enumerate(["<0>", "<1>", "<2>", "<3>", *"abcdefgh"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return dataclasses.replace(like, json=tokenizer.to_str())


async def start(port: int = 0, grpc_port: int = 0) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, str(port), str(grpc_port)), stdout=PIPE, stderr=PIPE
    )


@pytest.fixture
async def router() -> AsyncIterator[tuple[Process, int, int]]:
    """The process, its HTTP port and its gRPC port."""
    process = await start()
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    ready = re.fullmatch(r"outrider router ready: http://127.0.0.1:(\d+) \(gRPC 127.0.0.1:(\d+)\)\n", line)
    assert ready, line or (await process.communicate())[1]
    yield process, int(ready[1]), int(ready[2])
    if process.returncode is None:
        process.kill()
        await process.wait()


async def get(port: int, path: str, body: Any = None) -> tuple[int, str]:
    def fetch() -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data)
        try:
            with urllib.request.urlopen(asked) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(fetch)


async def health(grpc_port: int) -> str:
    async with channel(f"127.0.0.1:{grpc_port}") as connection:
        answer = await health_pb2_grpc.HealthStub(connection).Check(health_pb2.HealthCheckRequest())
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def test_without_a_verifier_it_is_up_but_not_ready(router: tuple[Process, int, int]) -> None:
    _, port, grpc_port = router
    assert (await get(port, "/health"))[0] == 503
    assert await health(grpc_port) == "NOT_SERVING"
    status, answer = await get(port, "/v1/completions", {"model": "m", "prompt": "x"})
    assert (status, json.loads(answer)["error"]["type"]) == (503, "unavailable_error")


async def test_a_request_over_either_api_runs_on_the_verifier_that_joined(
    router: tuple[Process, int, int], rig: Any
) -> None:
    _, port, grpc_port = router
    verifier = await rig.worker(Role.VERIFIER, "v")
    verifier.tokenizer = letters(verifier.tokenizer)
    verifier.register(f"127.0.0.1:{grpc_port}")
    assert (await verifier.states.get())[0] is not None
    assert (await get(port, "/health"))[0] == 200
    assert await health(grpc_port) == "SERVING"

    async def answer() -> None:
        opened = await verifier.next_command("open")
        assert list(opened.params.prompt) == [4, 5]
        step = verifier_pb2.Committed(session_id=opened.session_id, base=2, tokens=[6, 7])
        end = verifier_pb2.Finished(session_id=opened.session_id, reason=verifier_pb2.FINISH_REASON_LENGTH)
        verifier.say(committed=[step], finished=[end])

    asked = asyncio.create_task(
        get(port, "/v1/completions", {"model": "m", "prompt": [4, 5], "max_tokens": 2})
    )
    await answer()
    status, body = await asked
    assert status == 200, body
    (choice,) = json.loads(body)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("cd", "length")

    wanted = generation_pb2.GenerateRequest(
        model="m", token_ids=generation_pb2.TokenIds(ids=[4, 5]), max_tokens=2
    )
    async with channel(f"127.0.0.1:{grpc_port}") as connection:
        call = generation_pb2_grpc.GenerationStub(connection).Generate(wanted)
        answering = asyncio.create_task(answer())
        text = "".join([response.delta.text async for response in call])
        await answering
    assert text == "cd"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_cleanly_with_a_worker_joined_and_a_request_in_progress(
    router: tuple[Process, int, int], rig: Any, number: signal.Signals
) -> None:
    process, port, grpc_port = router
    verifier = await rig.worker(Role.VERIFIER, "v")
    verifier.tokenizer = letters(verifier.tokenizer)
    verifier.register(f"127.0.0.1:{grpc_port}")
    await verifier.states.get()
    asked = asyncio.create_task(get(port, "/v1/completions", {"model": "m", "prompt": [4, 5]}))
    await verifier.next_command("open")
    process.send_signal(number)
    out, err = await process.communicate()
    assert (process.returncode, out) == (0, b"")
    assert b"Traceback" not in err, err.decode()
    await verifier.stream_over.wait()
    assert (await asked)[0] == 503


async def test_a_router_that_hangs_is_noticed_by_its_workers(
    router: tuple[Process, int, int], rig: Any
) -> None:
    process, _, grpc_port = router
    verifier = await rig.worker(Role.VERIFIER, "v")
    verifier.register(f"127.0.0.1:{grpc_port}")
    assert (await verifier.states.get())[0] is not None
    process.send_signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(40):  # takes about five seconds; gRPC alone would take a minute
            assert (await verifier.states.get())[0] is None
    finally:
        process.send_signal(signal.SIGCONT)
    while (await verifier.states.get())[0] is None:
        pass


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
async def test_a_port_in_use_is_named(router: tuple[Process, int, int], flag: str) -> None:
    _, port, grpc_port = router
    second = await (start(port=port) if flag == "--port" else start(grpc_port=grpc_port))
    out, err = await second.communicate()
    assert second.returncode == 1
    assert out == b""
    taken = port if flag == "--port" else grpc_port
    assert f"cannot listen on 127.0.0.1:{taken}: ".encode() in err
    assert f"choose another with {flag} or --host".encode() in err


async def test_no_write_to_a_client_waits_for_it_to_acknowledge_the_one_before() -> None:
    """Connections are accepted as asyncio's server does it, on the socket that the router listens on."""
    accepted: asyncio.Queue[Any] = asyncio.Queue()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accepted.put(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    with listen("127.0.0.1", 0) as listener:
        async with await asyncio.start_server(connected, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            assert await accepted.get() != 0
            writer.close()


STANDING_STILL = """
import asyncio, threading
from outrider.worker import stepwatch
from router import service
from router.config import RouterConfig

stepwatch.UNKNOWN_SECONDS = 1.0

async def main():
    asyncio.get_running_loop().call_later(1.0, threading.Event().wait)
    await service.serve(RouterConfig(port=0, grpc_port=0))

asyncio.run(main())
"""


async def test_one_whose_event_loop_stands_still_ends_with_a_sentence() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STANDING_STILL, stdout=PIPE, stderr=PIPE
    )
    try:
        async with asyncio.timeout(120):
            _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 1
    last = said.decode().splitlines()[-1]
    assert last == "outrider router: its event loop stands still; this process can only be replaced"


async def test_a_store_that_refuses_ends_it_with_a_line_that_names_the_flag_and_no_password() -> None:
    with RedisServer() as redis:
        url = f"redis://:hunter2@127.0.0.1:{redis.port}"
        arguments = ("-m", "outrider_cli", "router", "--port", "0", "--grpc-port", "0", "--store", url)
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=PIPE, stderr=PIPE)
        out, err = await process.communicate()
    assert (process.returncode, out) == (1, b"")
    assert err.startswith(b"outrider router: --store: the Redis does not accept this user name and password")
    assert b"hunter2" not in err and b"Traceback" not in err


async def test_a_store_that_is_absent_is_waited_for(rig: Any) -> None:
    redis = RedisServer()
    arguments = ("-m", "outrider_cli", "router", "--port", "0", "--grpc-port", "0")
    environment = {**os.environ, "OUTRIDER_STORE": redis.url}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=PIPE, stderr=PIPE, env=environment
    )
    assert process.stdout is not None
    ready = re.search(r"http://\S+:(\d+) \(gRPC (\S+)\)", (await process.stdout.readline()).decode())
    assert ready is not None
    verifier = await rig.worker(Role.VERIFIER, "v")
    verifier.register(ready[2])  # the router passes on what its store says
    assert (await verifier.states.get())[0] is None
    assert (await get(int(ready[1]), "/health"))[0] == 503
    with redis:
        while (await verifier.states.get())[0] is None:
            pass
        assert (await get(int(ready[1]), "/health"))[0] == 200
        process.send_signal(signal.SIGTERM)
        _, err = await process.communicate()
    assert process.returncode == 0
    said = err.decode().splitlines()  # who writes logs notices it, too, if that takes long enough
    assert sum(line.endswith("going on with the workers that are known") for line in said) == 1
    assert sum(line.endswith("the store is back") for line in said) == 1


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("port", 65536, "--port"),
        ("grpc_port", -1, "--grpc-port"),
        ("num_speculative_tokens", -1, "--num-speculative-tokens"),
        ("max_sessions", 0, "--max-sessions"),
        ("seed", 2**64, "--seed"),
        ("store", "localhost", "--store"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_flag(field: str, value: int, flag: str) -> None:
    with pytest.raises(StartupError, match=f"^{flag} must be"):
        build(RouterConfig, {field: value})
