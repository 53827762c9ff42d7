"""The roles started by hand, each on the host that it is given."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.cluster.hosts import Host
from tests.cluster.process import ROOT, Process

TARGET = ROOT / "demo" / "models" / "target"
DRAFT = ROOT / "demo" / "models" / "draft"
SMALL = ("--kv-memory", "32MiB")  # a larger pool takes its time to write


@dataclass
class Roles:
    """A router, and the workers that register with it."""

    router_host: Host
    processes: list[Process] = field(default_factory=list)
    url: str = ""

    def router(self) -> None:
        process = self._start(self.router_host, "router", "--host", "0.0.0.0", "--insecure")
        process.wait_for("outrider router ready: http://")
        self.url = f"http://{self.router_host.address}:8000"

    def verifier(self, host: Host, target: str = str(TARGET), *options: str) -> Process:
        return self._worker(host, "verifier", "--target", target, *options)

    def drafter(self, host: Host, draft: str = str(DRAFT), *options: str) -> Process:
        return self._worker(host, "drafter", "--draft", draft, *options)

    def _worker(self, host: Host, role: str, *options: str) -> Process:
        where = ("--router", f"{self.router_host.address}:50051", "--host", "0.0.0.0", "--insecure")
        return self._start(
            host, role, *where, "--advertise", host.address, "--threads", "1", *SMALL, *options
        )

    def _start(self, host: Host, role: str, *options: str) -> Process:
        process = host.start(sys.executable, "-m", "outrider_cli", role, *options)
        self.processes.append(process)
        return process


@contextlib.contextmanager
def roles(router_host: Host) -> Iterator[Roles]:
    """A router that is ready; it and the workers that are started are killed at the end."""
    started = Roles(router_host)
    try:
        started.router()
        yield started
    finally:
        for process in reversed(started.processes):
            process.kill()


def address(worker: Process, role: str) -> str:
    """host:port that a worker registered; waits until it is taken in."""
    found = re.search(rf"outrider {role} ready: (\S+)", worker.wait_for(f"outrider {role} ready: "))
    assert found is not None
    return found[1]
