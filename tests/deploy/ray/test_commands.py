"""`make cluster`: a Ray of its own, here with Serve's own proxies in HAProxy's place."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from deploy.loopback import listeners, unasked
from outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.deploy.ray.conftest import KV_MEMORY, LEAKS, PATIENCE_SECONDS, ROOT, free_port, wait_until
from tests.plain_http import HTTP

pytestmark = [pytest.mark.ray, pytest.mark.process, pytest.mark.timeout(600)]

PROMPT = "def fibonacci(n):\n"
SMALL = tuple(f"{pool}.kv_memory={KV_MEMORY}" for pool in ("verifier", "drafter"))


class Command:
    """A command that starts a Ray; `interrupt` is Ctrl-C."""

    def __init__(self, *command: str, **environment: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**inherited, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.said += self.process.stdout

    def interrupt(self) -> int:
        """Its exit code, once neither it nor anything that it started is left."""
        started = descendants(self)
        assert any(process.name() == "raylet" for process in started)
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(PATIENCE_SECONDS)
        _, left = psutil.wait_procs(started, timeout=PATIENCE_SECONDS)
        assert left == [], "processes were left behind"
        return code

    def kill(self) -> None:
        """Whatever is left of it."""
        if self.process.poll() is None:
            for process in descendants(self):
                process.kill()
            self.process.kill()
            self.process.wait()


def descendants(command: Command) -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process(command.process.pid).children(recursive=True)
    return found


@pytest.fixture
def start() -> Iterator[Callable[..., Command]]:
    commands: list[Command] = []

    def start(*command: str, **environment: str) -> Command:
        commands.append(Command(*command, **environment))
        return commands[-1]

    yield start
    for command in commands:
        command.kill()


def ready(command: Command, url: str) -> Callable[[], bool]:
    """Returns a function that is true once there is a worker of each kind."""

    def look() -> bool:
        assert command.process.poll() is None, "".join(command.said)
        try:
            metrics = HTTP.get(f"{url}/metrics").raise_for_status().text
        except httpx.HTTPError:
            return False
        return all(f'outrider_workers{{role="{role}"}} 1.0' in metrics for role in ("verifier", "drafter"))

    return look


def ask(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT, **body}, timeout=PATIENCE_SECONDS)


def test_make_cluster_serves_the_demo_pair_and_ends_by_ctrl_c(start: Callable[..., Command]) -> None:
    """Refusals are ours through these proxies too."""
    port, grpc_port = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    ports = ("--port", str(port), "--grpc-port", str(grpc_port))
    command = start(
        sys.executable, "-m", "deploy.local", *ports, "seed=7", *SMALL, RAY_SERVE_ENABLE_HA_PROXY="0"
    )
    wait_until(ready(command, url), "both workers are taken in")
    wait_until(lambda: any("is ready: " + url in line for line in command.said), "it says so")
    folders = [Path(argument) for argument in _folders(command)]
    assert folders and all(folder.is_dir() for folder in folders)
    found = listeners(psutil.Process(command.process.pid))
    assert {port, grpc_port} <= {one.port for one in found}
    assert unasked(found, "127.0.0.1", ()) == []

    assert ask(url, max_tokens=8, temperature=0).json()["model"] == "outrider-demo"
    refused = [ask(url, temperature=-1), ask(url, model="other"), httpx.get(f"{url}/nothing")]
    assert [response.status_code for response in refused] == [400, 404, 404]
    assert [response.text for response in refused if LEAKS.search(response.text)] == []
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        events = list(stub.Generate(generation_pb2.GenerateRequest(text=PROMPT, max_tokens=8)))
        assert events[-1].WhichOneof("event") == "completed"
        with pytest.raises(grpc.RpcError) as raised:
            list(stub.Generate(generation_pb2.GenerateRequest(text=PROMPT, model="other")))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert "'other' is not served here" in raised.value.details()
    assert not LEAKS.search(raised.value.details())

    assert command.interrupt() == 0, "".join(command.said)
    assert [folder for folder in folders if folder.exists()] == []
    assert re.search(r"\bray\b", "".join(command.said)) is None, "Ray's words are in its log"


def _folders(command: Command) -> set[str]:
    """Returns the folders of Ray's files that its processes were told."""
    started = descendants(command)
    words = [word for process in started if process.name() == "raylet" for word in process.cmdline()]
    return {word.partition("=")[2] for word in words if word.startswith("--temp_dir=")}


def agents(command: Command) -> list[psutil.Process]:
    raylets = [one for one in descendants(command) if one.name() == "raylet"]
    return [child for raylet in raylets for child in raylet.children()]


def test_make_cluster_can_be_stopped_while_it_starts(start: Callable[..., Command]) -> None:
    ports = ("--port", str(free_port()), "--grpc-port", str(free_port()))
    command = start(sys.executable, "-m", "deploy.local", *ports)
    wait_until(lambda: agents(command) != [], "Ray starts what may outlive it")
    assert command.interrupt() == 0, "".join(command.said)


def test_make_cluster_refuses_what_cannot_be_with_a_sentence(start: Callable[..., Command]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, sentence in (
            (["drafter.replicas=2"], "there is no argument drafter.replicas; there is min_replicas"),
            (["--port", port], f"cannot listen on 127.0.0.1:{port}: choose another with --port or --host"),
            (["target=/nowhere", "propose=suffix"], "there is no folder or file /nowhere"),
            (["drafters"], "arguments are KEY=VALUE, such as drafter.max_replicas=2, not 'drafters'"),
        ):
            command = start(sys.executable, "-m", "deploy.local", *arguments)
            assert command.process.wait(PATIENCE_SECONDS) == 1
            wait_until(lambda command=command: command.said != [], "it says why")
            (line,) = command.said
            assert line.startswith(f"outrider cluster: {sentence}")
