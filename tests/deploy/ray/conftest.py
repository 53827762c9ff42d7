"""One Ray on this machine for all these tests, and one application on it at a time."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Any

import httpx
import pytest
import yaml
from tokenizers import Tokenizer

from outrider.sampling.params import SamplingParams
from outrider.wire.description import WorkerRecord
from tests.e2e.conftest import DRAFT, TARGET, Alone

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
PATIENCE_SECONDS = 240
CONFIG = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text())
# What would tell a client of our insides: traces, addresses, process ids, paths.
LEAKS = re.compile(r"Traceback|\bFile \"|\d+\.\d+\.\d+\.\d+|\bpid\b|/tmp|\.py\b|\bray\b", re.IGNORECASE)
QUICK = {  # Serve hears of measurements every half second, where it usually takes ten
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_SERVE_AUTOSCALING_METRIC_RECORD_INTERVAL_FACTOR": "0.1",
}


def free_port() -> int:
    """Returns a port that nobody has, nor gets before it is used: it lies between those of Ray's workers and
    those that the system hands out, among which Ray has fixed ones of its own (44217, 44227, 52365)."""
    while True:
        port = SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def wait_until(condition: Callable[[], bool], what: str | Callable[[], str]) -> None:
    """Waits with a deadline that only a hang can reach. `what`: what never happened, if it is reached."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < until, f"never happened: {what if isinstance(what, str) else what()}"
        time.sleep(0.1)


@dataclass
class Cluster:
    """Ray with Serve on it, and what clients need to know."""

    folder: Path
    port: int
    grpc_port: int
    dashboard_port: int
    started: bool = False  # an application
    config: dict[str, Any] = field(default_factory=dict)  # of the last `serve deploy`
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE_SECONDS)

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def serve(self, args: Mapping[str, Any]) -> None:
        """Has the application with these arguments running, by `serve deploy` of our config file."""
        (application,) = CONFIG["applications"]
        config = {
            **CONFIG,
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "grpc_options": {**CONFIG["grpc_options"], "port": self.grpc_port},
            "applications": [{**application, "args": dict(args)}],
        }
        self.stop()
        file = self.folder / "serve.yaml"
        file.write_text(yaml.safe_dump(config))
        self._start("deploy", f"--address={self._dashboard}", str(file))
        self.config = config

    def resize(self, deployment: str, replicas: int) -> None:
        """Asks for another number of replicas of a deployment, with the same config otherwise, as
        `serve deploy` does it."""
        from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

        (application,) = self.config["applications"]
        sizes = [{"name": deployment, "num_replicas": replicas}]
        client = ServeSubmissionClient(self._dashboard)
        client.deploy_applications({**self.config, "applications": [{**application, "deployments": sizes}]})

    @property
    def _dashboard(self) -> str:
        return f"http://127.0.0.1:{self.dashboard_port}"

    def serve_run(self, *arguments: str) -> None:
        """The same by `serve run`, with KEY=VALUEs."""
        import ray

        address = f"--address={ray.get_runtime_context().gcs_address}"
        self.stop()
        options = ("--non-blocking", address, "--name=outrider", "--route-prefix=/")
        self._start("run", *options, "deploy.app:build", *arguments)

    def _start(self, *command: str) -> None:
        done = subprocess.run([str(BIN / "serve"), *command], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        self.started = True
        wait_until(self._ready, "the application serves")

    def stop(self) -> None:
        """Ends the application, where one runs."""
        from ray import serve

        if self.started:
            serve.delete("outrider")
            self.started = False

    def _ready(self) -> bool:
        """With a verifier and, where there is one to come, a drafter."""
        from ray import serve

        application = serve.status().applications.get("outrider")
        assert application is None or application.status != "DEPLOY_FAILED", application
        try:
            return self.workers("verifier") > 0 and self.workers("drafter") > 0
        except httpx.HTTPError:
            return False

    def workers(self, role: str) -> int:
        """That a router has taken in."""
        metrics = self.http.get("/metrics").raise_for_status().text
        found = re.search(rf'^outrider_workers{{role="{role}"}} (\d+)', metrics, re.MULTILINE)
        return int(found[1]) if found else 0

    def records(self) -> dict[str, WorkerRecord]:
        """What the registry has."""
        from ray import serve

        found: dict[str, WorkerRecord] = (
            serve.get_deployment_handle("Registry", "outrider").present.remote().result(timeout_s=30)
        )
        return found

    def replicas(self, deployment: str) -> int:
        """That run now."""
        from ray import serve

        states = serve.status().applications["outrider"].deployments[deployment].replica_states
        return states.get("RUNNING", 0)

    def complete(self, prompt: str, max_tokens: int = 32, **options: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **options}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    from deploy.cluster import proxies_serve, see_through
    from deploy.local import environment

    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    before = dict(os.environ)
    os.environ.update({**environment(folder), **before, **QUICK, "OMP_NUM_THREADS": "1"})
    import ray
    from ray import serve
    from ray._private import ray_constants
    from ray.serve.config import gRPCOptions

    from deploy.ingress import SERVICER_FUNCTIONS

    found = Cluster(folder, free_port(), free_port(), free_port())
    many_hosts = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = (
        False  # as the environment says, if a test module has imported ray before
    )
    try:
        ray.init(
            num_cpus=16,
            labels={"pool": "any"},
            _temp_dir=str(folder),
            object_store_memory=128 * 2**20,
            include_dashboard=True,
            dashboard_host="127.0.0.1",
            dashboard_port=found.dashboard_port,
            log_to_driver=False,
        )
        start_serve = partial(
            serve.start,
            http_options={"host": "127.0.0.1", "port": found.port},
            grpc_options=gRPCOptions(port=found.grpc_port, grpc_servicer_functions=SERVICER_FUNCTIONS),
        )
        see_through(start_serve, lambda: proxies_serve(serve.status()))
        yield found
    finally:
        found.http.close()
        serve.shutdown()
        ray.shutdown()
        ray_constants.ENABLE_RAY_CLUSTER = many_hosts
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def expected() -> Callable[..., str]:
    """The text of the target alone."""
    alone = Alone()
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))

    def text(prompt: str, count: int, **sampling: Any) -> str:
        tokens = alone.tokens(tokenizer.encode(prompt).ids, SamplingParams(**sampling), count)
        return str(tokenizer.decode(tokens, skip_special_tokens=False))

    return text


# One worker in each pool, of the demo pair. A slow one is well: what a busy machine does is no illness.
DEMO = {
    "target": str(TARGET),
    "draft": str(DRAFT),
    "name": "demo",
    "insecure": True,
    "verifier.probe_seconds": 60,
    "drafter.probe_seconds": 60,
}
KV_MEMORY = "32MiB"  # a larger pool takes its time to write
