"""Router, verifier and drafter started by hand on hosts of their own, and asked from a fourth."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest

from tests.asking_on import asking_on, under_way
from tests.cluster.by_hand import Roles, address, roles
from tests.cluster.cases import accepted, ask_and_check, cases
from tests.cluster.client import HostClient
from tests.cluster.conftest import Eventually
from tests.cluster.hosts import Host
from tests.cluster.relay import Line, Relay, relayed
from tests.e2e.conftest import Alone

pytestmark = [pytest.mark.netns, pytest.mark.timeout(900)]

FAR = Line(delay_ms=10)  # 20 ms there and back
LONG = 250  # tokens: enough that a host can be cut off meanwhile


@pytest.fixture(scope="module")
def service(hosts: dict[str, Host]) -> Iterator[Roles]:
    with roles(hosts["front"]) as started:
        verifier, drafter = started.verifier(hosts["target"]), started.drafter(hosts["draft"])
        assert address(verifier, "verifier").startswith(hosts["target"].address + ":")
        assert address(drafter, "drafter").startswith(hosts["draft"].address + ":")
        yield started


@pytest.fixture
def client(hosts: dict[str, Host], service: Roles) -> HostClient:
    return HostClient(hosts["spare"], service.url)


def test_every_text_is_the_targets_own(client: HostClient, alone: Alone) -> None:
    assert accepted(ask_and_check(client, cases(8), alone))


@pytest.fixture
def relay(hosts: dict[str, Host], service: Roles) -> Iterator[Relay]:
    """A long line between drafter and verifier, beneath the connections that they have."""
    with relayed(hosts["draft"], hosts["target"], FAR) as made:
        yield made


def test_a_long_line_that_loses_packets_changes_no_text(
    client: HostClient, relay: Relay, alone: Alone, eventually: Eventually
) -> None:
    ask_and_check(client, cases(4), alone)
    eventually(lambda: accepted([client.ask(cases(1)[0].request)]), "drafts come in time")
    relay.become(replace(FAR, jitter_ms=8, loss=0.01))
    ask_and_check(client, cases(8), alone)


def test_a_drafter_that_reaches_the_router_but_no_verifier_costs_nothing_but_drafts(
    client: HostClient, relay: Relay, alone: Alone, eventually: Eventually
) -> None:
    relay.become(Line(cut=True))
    ask_and_check(client, cases(4), alone)
    relay.become(FAR)
    eventually(lambda: accepted([client.ask(cases(1)[0].request)]), "drafts were accepted again")


def test_a_drafters_host_may_be_cut_off_and_return(
    client: HostClient, hosts: dict[str, Host], alone: Alone, eventually: Eventually
) -> None:
    [case] = cases(1, max_tokens=LONG)
    under_way = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.ask, case.request, under_way.set)
        assert under_way.wait(240)
        hosts["draft"].cut()
        try:
            assert asked.result(240).text == case.expected(alone)
            eventually(lambda: client.workers("drafter") == 0, "the drafter was taken out")
            answers = client.ask_together([case.request for case in cases(2)])
            assert not accepted(answers)
        finally:
            hosts["draft"].join()
    eventually(lambda: client.workers("drafter") == 1, "the drafter was taken in again")
    eventually(lambda: accepted([client.ask(case.request)]), "drafts were accepted again")
    ask_and_check(client, cases(4), alone)


def test_a_verifiers_host_may_be_cut_off_and_return(
    client: HostClient, hosts: dict[str, Host], alone: Alone, eventually: Eventually
) -> None:
    [case] = cases(1)
    hosts["target"].cut()
    try:
        eventually(lambda: client.workers("verifier") == 0, "the verifier was taken out")
        assert client.models() == []
    finally:
        hosts["target"].join()
    eventually(lambda: client.workers("verifier") == 1, "the verifier was taken in again")
    eventually(lambda: accepted([client.ask(case.request)]), "drafts were accepted again")
    ask_and_check(client, cases(4), alone)


def test_requests_go_on_when_their_verifiers_host_is_cut_off(
    client: HostClient, service: Roles, hosts: dict[str, Host], alone: Alone, eventually: Eventually
) -> None:
    second = service.verifier(hosts["spare"])
    asked = cases(4, max_tokens=LONG)

    def both_run() -> bool:
        running = client.metric("vllm:num_requests_running")
        return len(running) == 2 and min(running) > 0

    try:
        address(second, "verifier")
        with asking_on([partial(client.ask, case.request) for case in asked]) as answers:
            eventually(both_run, "both verifiers had requests")
            at = time.monotonic()
            hosts["target"].cut()
            eventually(lambda: client.workers("verifier") == 1, "the verifier was taken out")
        assert under_way(answers, at)
        for case, each in zip(asked, answers, strict=True):
            assert each and {one.answer.text for one in each} == {case.expected(alone)}
    finally:
        hosts["target"].join()
        second.kill()
