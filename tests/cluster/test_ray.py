"""The Ray Serve application on a cluster of three hosts: each pool on its own, as the labels say."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cluster.cases import accepted, ask_and_check, cases
from tests.cluster.client import HostClient
from tests.cluster.conftest import Eventually
from tests.cluster.hosts import Host
from tests.cluster.ray_cluster import BIN, RayCluster, application, ray_cluster
from tests.e2e.conftest import DRAFT, TARGET, Alone

pytestmark = [pytest.mark.netns, pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster(hosts: dict[str, Host]) -> Iterator[RayCluster]:
    pools = {pool: hosts[pool] for pool in ("draft", "target")}
    with ray_cluster(hosts["front"], pools) as cluster:
        cluster.serve(application(TARGET, DRAFT))
        yield cluster


@pytest.fixture
def client(hosts: dict[str, Host], cluster: RayCluster) -> HostClient:
    return cluster.client(hosts["spare"])


def test_every_text_is_the_targets_own(client: HostClient, alone: Alone) -> None:
    assert accepted(ask_and_check(client, cases(8), alone))


def test_each_pool_is_on_its_own_host(cluster: RayCluster, hosts: dict[str, Host]) -> None:
    addresses = {role: address.rpartition(":")[0] for role, address in cluster.records().items()}
    assert addresses == {"verifier": hosts["target"].address, "drafter": hosts["draft"].address}


def test_nobody_asks_ray_without_the_token(cluster: RayCluster) -> None:
    status = (str(BIN / "ray"), "status", f"--address={cluster.address}")
    asked = cluster.head.start(*status, environment={"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64})
    assert "InvalidAuthToken" in asked.wait_for("Error")


def test_a_draft_node_may_die_and_return(
    cluster: RayCluster, client: HostClient, hosts: dict[str, Host], alone: Alone, eventually: Eventually
) -> None:
    [case] = cases(1, max_tokens=250)
    under_way = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.ask, case.request, under_way.set)
        assert under_way.wait(240)
        hosts["draft"].empty()
        assert asked.result(240).text == case.expected(alone)
    eventually(lambda: client.workers("drafter") == 0, "the drafter was taken out")
    assert not accepted(client.ask_together([case.request for case in cases(2)]))
    cluster.start(hosts["draft"], "draft").wait_for("Ray runtime started")
    eventually(lambda: client.workers("drafter") == 1, "Ray Serve started another drafter")
    eventually(lambda: accepted([client.ask(case.request)]), "drafts were accepted again")
    ask_and_check(client, cases(4), alone)
