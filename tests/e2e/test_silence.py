"""Workers that stand still (SIGSTOP): their sessions go on elsewhere, and they are taken in again."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import grpc.aio
import httpx
import psutil
import pytest

from outrider.v1 import generation_pb2_grpc
from tests.e2e.conftest import ROOT, TARGET, Alone, Serve, start
from tests.e2e.test_serve import cases, over_grpc

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

TOKENS = 200
Eventually = Callable[[Callable[[], bool], str], None]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A second verifier beside the one of `outrider serve`."""
    running = start("--seed", "7")
    where = ["--router", running.grpc_address, "--name", "outrider-demo", "--threads", "1"]
    second = subprocess.Popen(
        [sys.executable, "-m", "outrider_cli", "verifier", "--target", str(TARGET), *where],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert second.stdout is not None
    try:
        assert any("verifier ready" in line for line in second.stdout), "it ended before it was ready"
        yield running
    finally:
        second.kill()
        second.wait()
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(20) == 0, "".join(running.said[-30:])


def metric(serve: Serve, name: str) -> float:
    found = re.findall(rf"^{re.escape(name)}\S* (\S+)$", httpx.get(f"{serve.url}/metrics").text, re.MULTILINE)
    return sum(map(float, found))


async def ask(serve: Serve) -> list[list[int]]:
    async with grpc.aio.insecure_channel(serve.grpc_address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        return list(await asyncio.gather(*(over_grpc(stub, case, TOKENS) for case in cases(8))))


@pytest.mark.parametrize("role", ["verifier", "drafter"])
async def test_a_stopped_worker_costs_a_pause_and_comes_back(
    serve: Serve, alone: Alone, eventually: Eventually, role: str
) -> None:
    expected = [alone.tokens(case.prompt, case.sampling, TOKENS) for case in cases(8)]
    workers = f'outrider_workers{{role="{role}"}}'
    here = metric(serve, workers)
    before = metric(serve, "vllm:generation_tokens_total")
    worker: psutil.Process = serve.child(role)
    answers = asyncio.create_task(ask(serve))
    while metric(serve, "vllm:generation_tokens_total") == before and not answers.done():  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    worker.suspend()
    try:
        assert await answers == expected
        await asyncio.to_thread(eventually, lambda: metric(serve, workers) == here - 1, f"a {role} less")
    finally:
        worker.resume()
    await asyncio.to_thread(eventually, lambda: metric(serve, workers) == here, f"the {role} is back")
    assert await ask(serve) == expected
