"""A long line between drafter and verifier: slower at worst, and the same text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.by_hand import address, roles
from tests.cluster.cases import accepted, ask_and_check, cases
from tests.cluster.client import HostClient
from tests.cluster.conftest import Eventually
from tests.cluster.hosts import Host
from tests.cluster.relay import Line, Relay, relayed
from tests.e2e.conftest import Alone

pytestmark = pytest.mark.netns

FAR = Line(delay_ms=10)  # 20 ms there and back


@pytest.fixture(scope="module")
def relay(hosts: dict[str, Host]) -> Iterator[Relay]:
    with relayed(hosts["draft"], hosts["target"], FAR) as made:
        yield made


@pytest.fixture(scope="module")
def client(hosts: dict[str, Host], relay: Relay) -> Iterator[HostClient]:
    with roles(hosts["front"]) as started:
        verifier, drafter = started.verifier(hosts["target"]), started.drafter(hosts["draft"])
        address(verifier, "verifier"), address(drafter, "drafter")
        yield HostClient(hosts["spare"], started.url)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(FAR, id="20 ms"),
        pytest.param(Line(delay_ms=10, jitter_ms=8, loss=0.01), id="20 ms, jitter and loss"),
    ],
)
def test_every_text_is_the_targets_own(relay: Relay, client: HostClient, alone: Alone, line: Line) -> None:
    relay.become(line)
    assert accepted(ask_and_check(client, cases(16), alone))


def test_a_drafter_that_reaches_the_router_but_no_verifier_costs_nothing_but_drafts(
    relay: Relay, client: HostClient, alone: Alone, eventually: Eventually
) -> None:
    relay.become(Line(cut=True))
    ask_and_check(client, cases(4), alone)
    relay.become(FAR)
    eventually(lambda: accepted([client.ask(cases(1)[0].request)]), "drafts were accepted again")
