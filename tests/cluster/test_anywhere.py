"""A drafter at the edge: behind NAT, on a long and narrow line that loses packets, with a URL and a token."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from router.api.keys import ApiKey, digest
from tests.certificates import Authority, flags
from tests.cluster.by_hand import DRAFT, SMALL
from tests.cluster.cases import accepted, ask_and_check, cases
from tests.cluster.client import HostClient
from tests.cluster.conftest import Eventually
from tests.cluster.hosts import Host
from tests.cluster.namespace import ip
from tests.cluster.process import Process
from tests.cluster.relay import Line, Relay, relayed
from tests.e2e.conftest import Alone
from tests.tiny_models import slow_demo_target

pytestmark = [pytest.mark.netns, pytest.mark.timeout(900)]

EDGE = Line(delay_ms=40, jitter_ms=8, loss=0.005, kbit_s=200, nat=True)  # 80 ms there and back
TOKEN = "dt-outrider-of-the-laptop"
MOVED = "10.77.0.99"


@dataclass
class Edge:
    """The service in the one place, a drafter in the other."""

    service: Host
    laptop: Host
    relay: Relay
    drafter: Process
    client: HostClient
    tokens: Path

    def move(self) -> None:
        """The laptop gets another address, and loses its own."""
        way = ("route", "replace", f"{self.service.address}/32", "dev", f"to-{self.service.name}")
        ip("-n", self.laptop.namespace, "address", "add", f"{MOVED}/32", "dev", "eth0")
        ip("-n", self.laptop.namespace, *way, "src", MOVED)
        ip("-n", self.service.namespace, "route", "add", f"{MOVED}/32", "dev", f"to-{self.laptop.name}")
        ip("-n", self.laptop.namespace, "address", "delete", f"{self.laptop.address}/24", "dev", "eth0")

    def come_home(self) -> None:
        """The laptop has the address that the other tests know."""
        if MOVED in ip("-n", self.laptop.namespace, "address", "show", "dev", "eth0"):
            ip("-n", self.laptop.namespace, "address", "add", f"{self.laptop.address}/24", "dev", "eth0")
            ip("-n", self.laptop.namespace, "address", "delete", f"{MOVED}/32", "dev", "eth0")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return slow_demo_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def alone(target: Path) -> Alone:
    return Alone(target)


@pytest.fixture(scope="module")
def edge(hosts: dict[str, Host], target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    folder = tmp_path_factory.mktemp("edge")
    tokens = folder / "tokens"
    tokens.write_text(ApiKey("laptop", digest(TOKEN)).line + "\n")
    started: list[Process] = []

    def start(host: Host, role: str, *options: str, **environment: str) -> Process:
        process = host.start(sys.executable, "-m", "outrider_cli", role, *options, environment=environment)
        started.append(process)
        return process

    service, laptop = hosts["front"], hosts["spare"]
    with relayed(laptop, service, EDGE) as relay:
        files = Authority().write(folder / "tls", service.address, "127.0.0.1")
        assert files.ca is not None
        try:
            reach = ("--host", "0.0.0.0", *flags(files))
            router = start(service, "router", *reach, "--drafter-tokens", str(tokens))
            router.wait_for("outrider router ready: ")
            workers = ("--router", "127.0.0.1:50052", "--advertise", service.address, "--threads", "1")
            asked = (
                *SMALL,
                "--join-port",
                "0",
                "--no-compare",
            )
            start(service, "verifier", "--target", str(target), *reach, *workers, *asked)
            url = f"https://{service.address}:50051"
            drafter = start(
                laptop,
                *("drafter", "--draft", str(DRAFT), "--join", url, "--join-ca", str(files.ca)),
                *("--threads", "1", *SMALL),
                OUTRIDER_TOKEN=TOKEN,
            )
            drafter.wait_for("outrider drafter ready: ")
            started[1].wait_for("outrider verifier ready: ")
            client = HostClient(service, f"https://{service.address}:8000", files.ca)
            made = Edge(service, laptop, relay, drafter, client, tokens)
            yield made
            made.come_home()
        finally:
            for process in reversed(started):
                process.kill()


def test_it_drafts_across_the_line_and_costs_no_token(
    edge: Edge, alone: Alone, eventually: Eventually
) -> None:
    eventually(lambda: accepted([edge.client.ask(cases(1)[0].request)]), "drafts come in time")
    ask_and_check(edge.client, cases(4), alone)
    eventually(
        lambda: [trip for one in edge.client.live()["drafters"] for trip in one["round_trips"]] != [], "told"
    )
    told = edge.client.live()
    (price,) = (verifier["price"] for verifier in told["verifiers"])
    (trip,) = (trip for drafter in told["drafters"] for trip in drafter["round_trips"])
    assert trip["seconds"] > 0.06
    verified = sum(edge.client.metric("vllm:spec_decode_num_draft_tokens_total"))
    taken = sum(edge.client.metric("vllm:spec_decode_num_accepted_tokens_total"))
    assert taken > price * verified, "what was verified cost more than it brought"


def test_it_drafts_on_after_a_change_of_network_without_a_restart(
    edge: Edge, alone: Alone, eventually: Eventually
) -> None:
    edge.move()
    ask_and_check(edge.client, cases(2), alone)
    eventually(lambda: accepted([edge.client.ask(cases(1)[0].request)]), "drafts come from the new address")
    edge.relay.become(replace(EDGE, cut=True))
    eventually(lambda: edge.client.workers("drafter") == 0, "the drafter was taken out")
    ask_and_check(edge.client, cases(2), alone)
    edge.relay.become(EDGE)
    eventually(lambda: edge.client.workers("drafter") == 1, "the drafter was taken in again")
    eventually(lambda: accepted([edge.client.ask(cases(1)[0].request)]), "drafts were accepted again")
    assert edge.drafter.running


def test_a_token_that_is_taken_away_ends_its_drafter(edge: Edge, eventually: Eventually) -> None:
    edge.tokens.write_text("# nobody\n")
    eventually(lambda: not edge.drafter.running, "the drafter ended")
    refused = "the router at .* refuses this drafter: the token is not (in force any more|known here)"
    assert re.search(f"outrider drafter: {refused}", str(edge.drafter))
    eventually(lambda: edge.client.workers("drafter") == 0, "the drafter was taken out")
