"""`outrider serve` as a user starts it, on the demo pair, and the text that the target alone would give."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from demo import pair
from outrider.engine.engine import Engine, Work
from outrider.engine.loading import load_engine
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row, TokenCounts, draw

if TYPE_CHECKING:
    from tests.e2e.two_routers import Service

Eventually = Callable[[Callable[[], bool], str], None]
ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "demo" / "models" / "target"
DRAFT = ROOT / "demo" / "models" / "draft"
KV_MEMORY = "56MiB"  # a context of 8,192 tokens fits in; more takes its time to write, and none is full here
# Only a hang can reach these.
READY_SECONDS = 240
PATIENCE_SECONDS = 240
END_SECONDS = 60


@dataclass
class Serve:
    """A running `outrider serve`."""

    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)
    url: str = ""
    grpc_address: str = ""

    def child(self, role: str) -> psutil.Process:
        """The process of one role."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if {role, f"outrider.worker.{role}"} & set(child.cmdline()):
                return child
        raise LookupError(f"no {role} runs; it said:\n" + "".join(self.said[-30:]))

    def wait_for(self, text: str, seconds: float = READY_SECONDS) -> str:
        """The first line said so far, or from now on, that holds `text`."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for line in list(self.said):
                if text in line:
                    return line
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"{text!r} was never said:\n" + "".join(self.said))

    def end(self) -> None:
        """Ctrl-C: it ends well."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(END_SECONDS) == 0, "".join(self.said[-30:])


def start(*arguments: str) -> Serve:
    command = [sys.executable, "-m", "outrider_cli", "serve", "--port", "0", "--grpc-port", "0"]
    command += ["--target", pair.NAME, "--kv-memory", KV_MEMORY, *arguments]
    # A store of other routers is not for a service that keeps to itself.
    store = {"OUTRIDER_STORE": "redis://127.0.0.1:1"}
    environment = {**os.environ, **store, "OMP_NUM_THREADS": "1", "COLUMNS": "400"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment
    )
    serve = Serve(process)

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            serve.said.append(line)

    threading.Thread(target=read, daemon=True).start()
    try:
        said = serve.wait_for("is ready: http")
    except BaseException:
        process.kill()  # its children end with it
        raise
    found = re.search(r"is ready: (http://\S+) .*gRPC (\S+?)\)", said)
    assert found is not None
    serve.url, serve.grpc_address = found[1], found[2]
    return serve


@pytest.fixture(scope="session")
def serve() -> Iterator[Serve]:
    running = start("--seed", "7", "--no-compare")  # drafts are taken, however busy this machine is
    yield running
    children = psutil.Process(running.process.pid).children(recursive=True)
    running.end()
    assert not left_behind(children)


def left_behind(children: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that still run. One that has ended may be known until the system has heard who cares."""

    def runs(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [child for child in children if runs(child)]


class Alone:
    """The target by itself: one token at a time, no drafts, nobody else in the batch."""

    def __init__(self, target: Path = TARGET) -> None:
        self.engine: Engine = load_engine(str(target), threads=1, kv_memory_bytes=2**24)
        self._known: dict[tuple[object, ...], list[int]] = {}

    def tokens(self, prompt: Sequence[int], sampling: SamplingParams, count: int) -> list[int]:
        key = (tuple(prompt), repr(sampling), count)
        if key not in self._known:
            self._known[key] = self._run(list(prompt), sampling, count)
        return self._known[key]

    def _run(self, prompt: list[int], sampling: SamplingParams, count: int) -> list[int]:
        pool = self.engine.pool
        table = pool.open([])
        counts = TokenCounts(prompt, ())
        log = list(prompt)
        while len(log) < len(prompt) + count:
            start = table.length
            pool.extend(table, len(log) - start)
            logits = self.engine.step([Work(table.blocks, start, log[start:], 1)])
            token = int(draw(logits, [Row(sampling, len(log), counts, ())])[0])
            counts.extend([token])
            log.append(token)
        pool.close(table)
        return log[len(prompt) :]


@pytest.fixture(scope="session")
def alone() -> Alone:
    return Alone()


@pytest.fixture
def eventually() -> Eventually:
    """Waits for a condition, with a deadline that only a hang can reach."""

    def wait(condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < until, f"never happened: {what}"
            time.sleep(0.05)

    return wait


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    """Two routers around one Redis; tests kill roles of it, and `revive` starts them again."""
    from tests.e2e.two_routers import two_routers

    with two_routers() as made:
        yield made


@pytest.fixture
def complete(service: Service, eventually: Eventually) -> Service:
    """With all roles running, and all workers at both routers."""
    service.revive()
    for role in ("verifier", "drafter"):
        eventually(lambda role=role: service.workers(role) == [2, 2], f"both routers have two {role}s")  # type: ignore[misc]
    return service
