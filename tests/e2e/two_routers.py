"""Two routers around one Redis, with two verifiers and two drafters: all real processes, each by itself."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from outrider.store.redis import RedisStore
from outrider.store.url import parse_store_url
from outrider.wire.description import WorkerRecord
from tests.e2e.conftest import DRAFT, ROOT, TARGET
from tests.forked import Forked, started
from tests.plain_http import HTTP
from tests.redis_server import RedisServer

READY_SECONDS = 240  # only a hang can reach it
END_SECONDS = 120  # likewise
ALWAYS = ("--no-compare",)  # drafts are taken, however busy this machine is
PROPOSERS = (("--draft", str(DRAFT)), ("--propose", "suffix"))  # of the drafters


@dataclass
class Role:
    """A process of one role."""

    command: tuple[str, ...]
    said: list[str] = field(default_factory=list)

    def start(self) -> None:
        self.ready = threading.Event()
        command = (sys.executable, "-m", "outrider_cli", *self.command)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = started(command, environment) or subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        threading.Thread(target=self._read, args=(self.process, self.ready), daemon=True).start()

    def _read(self, process: subprocess.Popen[str] | Forked, ready: threading.Event) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.said.append(line)
            if " ready: " in line:
                ready.set()

    def wait(self) -> str:
        """The ready line."""
        assert self.ready.wait(READY_SECONDS), "".join(self.said)
        return next(line for line in reversed(self.said) if " ready: " in line)

    @property
    def address(self) -> str:
        """What the ready line names first: a router's URL, a worker's host and port."""
        return self.wait().split()[3]

    @property
    def grpc_address(self) -> str:
        """A router's, for clients."""
        found = re.search(r"gRPC ([^,)\s]+)", self.wait())
        assert found is not None
        return found[1]

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def end(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        self.process.wait(END_SECONDS)


@dataclass
class Service:
    redis: RedisServer
    routers: list[Role]
    verifiers: list[Role]
    drafters: list[Role]

    @property
    def roles(self) -> list[Role]:
        return [*self.routers, *self.verifiers, *self.drafters]

    @property
    def urls(self) -> list[str]:
        return [router.address for router in self.routers]

    def revive(self) -> None:
        """Starts again whatever has ended, and returns when it is ready."""
        ended = [role for role in self.roles if not role.running]
        for role in ended:
            role.start()
        for role in ended:
            role.wait()

    def workers(self, role: str) -> list[int]:
        """How many each router has."""
        return [
            int(next(iter(self._samples(url, "outrider_workers", f'role="{role}"')), 0)) for url in self.urls
        ]

    def running(self, verifier: str) -> float:
        """Sessions in its batch, as the routers heard last."""
        label = f'engine="{verifier}"'
        return max(
            (count for url in self.urls for count in self._samples(url, "vllm:num_requests_running", label)),
            default=0.0,
        )

    def generated(self) -> float:
        """Tokens that the routers have sent, since they were started."""
        return sum(sum(self._samples(url, "vllm:generation_tokens_total", "")) for url in self.urls)

    def records(self) -> dict[str, WorkerRecord]:
        """What the store has, by address."""

        async def read() -> dict[str, WorkerRecord]:
            store = RedisStore(parse_store_url(self.redis.url))
            workers = store.workers()
            found = await anext(workers)
            await workers.aclose()  # type: ignore[attr-defined]
            await store.close()
            return {record.address: record for record in found.values()}

        return asyncio.run(read())

    @staticmethod
    def _samples(url: str, name: str, label: str) -> list[float]:
        """A metric's, where its labels hold `label`."""
        lines = HTTP.get(f"{url}/metrics").text.splitlines()
        return [
            float(line.rpartition(" ")[2])
            for line in lines
            if line.split("{")[0].split(" ")[0] == name and label in line
        ]


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


@contextmanager
def two_routers() -> Iterator[Service]:
    """The service, with all roles ready. Verifiers keep their addresses when they are started again."""
    with RedisServer() as redis:
        store = ("--store", redis.url)
        target = ("--target", str(TARGET), "--name", "outrider-demo")
        worker = ("--threads", "1", "--kv-memory", "32MiB", *store)
        made = Service(
            redis,
            [Role(("router", "--port", "0", "--grpc-port", "0", *store)) for _ in range(2)],
            [Role(("verifier", *target, *ALWAYS, "--port", free_port(), *worker)) for _ in range(2)],
            [Role(("drafter", *proposer, *worker)) for proposer in PROPOSERS],
        )
        try:
            for role in made.roles:
                role.start()
            for role in made.roles:
                role.wait()
            yield made
        finally:
            for role in made.roles:
                role.process.kill()
                role.process.wait()
