"""Short storms: whatever fails, every stream ends, and is what it would have been."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.chaos.cluster import Cluster, cluster
from tests.chaos.faults import ROGUE, Kind
from tests.chaos.references import Case, cases
from tests.chaos.report import to_markdown
from tests.chaos.storm import storm

pytestmark = [pytest.mark.process, pytest.mark.chaos, pytest.mark.timeout(1200)]

SECONDS = 20.0  # or until what a storm begins with has happened
STREAMS = 10  # four over gRPC, four over HTTP, two of the Python client
TOKENS = (60, 240)  # of an answer
KV_MEMORY = "64MiB"  # three times what all of them take
KILLS = (
    ("router", Kind.KILL),
    ("verifier", Kind.KILL),
    ("drafter", Kind.KILL),
    (ROGUE, Kind.GARBAGE),
    ("router", Kind.KILL),  # a second time: where the first came, all streams may have waited for their ids
)
PAUSES = (("redis", Kind.EMPTY), ("verifier", Kind.FREEZE), ("drafter", Kind.CUT), ("router", Kind.CUT))


@pytest.fixture(scope="module")
def service() -> Iterator[Cluster]:
    with cluster(KV_MEMORY) as made:
        yield made


@pytest.fixture(scope="module")
def known() -> list[Case]:
    return cases(STREAMS, TOKENS)


@pytest.mark.parametrize(("seed", "first"), [(1, KILLS), (2, PAUSES)], ids=["kills", "pauses"])
def test_every_stream_ends_and_equals_its_reference(
    service: Cluster, known: list[Case], seed: int, first: tuple[tuple[str, Kind], ...]
) -> None:
    """CHAOS_SEED gives other targets and moments; the kinds of faults that come first are the same."""
    seed = int(os.environ.get("CHAOS_SEED", seed))
    report = storm(service, known, seconds=SECONDS, seed=seed, begins_with=first)
    print(to_markdown(report))
    assert report.errors == report.visit.errors == report.deaths == [], f"CHAOS_SEED={seed}"
    assert {"flood", "hop", "lie"} == {name.split()[0] for name in report.visit.attempts}
    assert report.sound
    expected = {
        f"{role} {kind.value}" for role, kind in first if kind is not Kind.CUT or not report.no_cables
    }
    assert expected <= set(report.faults)
    assert report.resumptions > 0 or first is not KILLS, "no router's death reached a stream"
    assert set(report.by_client) == {"grpc", "http", "python"}
