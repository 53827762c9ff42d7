"""A service of real processes with tiny models, and whether it is as it was after what was sent to it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, settings

from outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.cluster.process import Process
from tests.plain_http import HTTP
from tests.tiny_models import build

INPUTS = int(os.environ.get("FUZZ_INPUTS", "500"))  # in all tests of this folder together
PROMPT = [5, 6, 7, 8]
TOKENS = 24
CONTEXT = 128  # tokens: a request without a limit of its own is soon over
ANSWER_SECONDS = 60.0  # only a hang can reach it


def fuzzed(share: float) -> settings:
    """So large a share of the inputs."""
    return settings(
        max_examples=max(1, round(INPUTS * share)),
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


@dataclass
class Service:
    """Addresses of a router, a verifier and a drafter, and their processes."""

    processes: list[Process]
    url: str
    router: str
    verifier: str
    drafter: str
    expected: list[int]  # tokens of the request that is asked again and again

    def ask(self) -> list[int]:
        """A normal request by gRPC: its tokens."""
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=PROMPT),
            max_tokens=TOKENS,
            temperature=0.9,
            seed=7,
            ignore_eos=True,
        )
        with grpc.insecure_channel(self.router) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            responses = list(stub.Generate(request, timeout=ANSWER_SECONDS))
        assert responses[-1].HasField("completed")
        return [token for response in responses for token in response.delta.token_ids]

    def check(self) -> None:
        """Nothing has ended, nothing was raised, and the answer is what it was."""
        assert self.ask() == self.expected
        assert HTTP.get(f"{self.url}/health", timeout=ANSWER_SECONDS).status_code == 200
        for process in self.processes:
            assert process.running, f"it ended: {process}"
            raised = [line for line in process.said if "Traceback" in line or " ERROR " in line]
            assert not raised, f"it raised: {process}"


def started(role: str, *options: str) -> Process:
    return Process((sys.executable, "-m", "outrider_cli", role, *options), {})


def ready(process: Process, role: str) -> Any:
    found = re.search(
        rf"outrider {role} ready: (\S+)(?: \(gRPC (\S+)\))?", process.wait_for(f"{role} ready: ")
    )
    assert found is not None
    return found


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    models: Path = tmp_path_factory.mktemp("models")
    short = {"max_position_embeddings": CONTEXT}
    target = build("llama", models / "target", **short)
    draft = build("llama", models / "draft", seed=1, **short)
    processes = [started("router", "--port", "0", "--grpc-port", "0")]
    try:
        url, router = ready(processes[0], "router").groups()
        worker = ("--router", router, "--threads", "1", "--kv-memory", "16MiB")
        processes += [
            started("verifier", "--target", str(target), *worker),
            started("drafter", "--draft", str(draft), *worker),
        ]
        verifier = ready(processes[1], "verifier")[1]
        drafter = ready(processes[2], "drafter")[1]
        running = Service(processes, url, router, verifier, drafter, [])
        running.expected = running.ask()
        yield running
    finally:
        for process in reversed(processes):
            process.kill()
