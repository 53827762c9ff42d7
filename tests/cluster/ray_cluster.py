"""A Ray cluster across hosts: a head, and a node for each pool, labelled with its name."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from deploy.local import BUSY_MACHINE
from tests.cluster.client import HostClient
from tests.cluster.hosts import Host
from tests.cluster.process import Process

GCS_PORT = 6379
BIN = Path(sys.executable).parent
HTTP_PORT = 8000
PATIENCE_SECONDS = 240.0  # only a hang can reach it


@dataclass
class RayCluster:
    """What runs on the head speaks to the whole cluster. Nobody joins without the token."""

    head: Host
    folder: Path  # short: Ray puts sockets in it
    token: str
    processes: list[Process] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"{self.head.address}:{GCS_PORT}"

    def start(self, host: Host, pool: str) -> Process:
        """Starts the head, or another host's node. It is up when it says so."""
        what = ("--head", f"--port={GCS_PORT}") if host == self.head else (f"--address={self.address}",)
        return self._start(host, *node(host, self.folder / host.name, f"pool={pool}", 2, *what))

    def client(self, host: Host) -> HostClient:
        return HostClient(host, f"http://{self.head.address}:{HTTP_PORT}")

    def serve(self, application: Mapping[str, Any]) -> None:
        """Runs an application, for all hosts to reach; returns when it has a verifier and a drafter."""
        config = self.folder / "serve.json"  # JSON is YAML
        http = {"host": "0.0.0.0", "port": HTTP_PORT}
        config.write_text(
            json.dumps({"proxy_location": "HeadOnly", "http_options": http, "applications": [application]})
        )
        asked = self._start(
            self.head,
            str(BIN / "serve"),
            "run",
            "--non-blocking",
            f"--address={self.address}",
            str(config),
        )
        asked.wait()
        client = self.client(self.head)
        until = time.monotonic() + PATIENCE_SECONDS
        while not serves(client):
            assert time.monotonic() < until, f"the application never served: {asked}"
            time.sleep(0.1)

    def _start(self, host: Host, *command: str) -> Process:
        process = host.start(
            *command,
            environment={
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": self.token,
                "RAY_SERVE_ENABLE_HA_PROXY": "1",
                "RAY_USAGE_STATS_ENABLED": "0",
                **BUSY_MACHINE,
            },
        )
        self.processes.append(process)
        return process


def node(host: Host, folder: Path, labels: str, cpus: float, *what: str) -> tuple[str, ...]:
    """The command that starts a host's Ray. It is up when it says so."""
    return (
        str(BIN / "ray"),
        "start",
        *what,
        "--block",
        "--disable-usage-stats",
        f"--num-cpus={cpus:g}",
        "--object-store-memory=100000000",
        f"--node-ip-address={host.address}",
        f"--labels={labels}",
        f"--temp-dir={folder}",
    )


def serves(client: HostClient) -> bool:
    """First there is no server, then none that knows the application, then its workers are yet to come."""
    try:
        return client.workers("verifier") > 0 and client.workers("drafter") > 0
    except httpx.HTTPError:
        return False


def application(target: Path, draft: Path, **args: Any) -> dict[str, Any]:
    """deploy.app with one worker in each pool, and the routers on the head."""
    return {
        "name": "outrider",
        "route_prefix": "/",
        "import_path": "deploy.app:build",
        "args": {
            "target": str(target),
            "draft": str(draft),
            "insecure": True,
            "router": {"labels": {"pool": "head"}},
            "verifier": {"labels": {"pool": "target"}},
            "drafter": {"labels": {"pool": "draft"}},
            **args,
        },
    }


@contextlib.contextmanager
def ray_cluster(head: Host, pools: Mapping[str, Host]) -> Iterator[RayCluster]:
    """A cluster that is up: the head's pool is called `head`. All of it is killed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    cluster = RayCluster(head, folder, secrets.token_hex(32))
    try:
        cluster.start(head, "head").wait_for("Ray runtime started")
        for node in [cluster.start(host, pool) for pool, host in pools.items()]:
            node.wait_for("Ray runtime started")
        yield cluster
    finally:
        for host in (*pools.values(), head):
            host.empty()
        shutil.rmtree(folder, ignore_errors=True)
