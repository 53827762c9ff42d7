"""A short storm: whatever fails, every stream ends, and is what it would have been."""

from __future__ import annotations

import os
import secrets

import pytest

from tests.chaos.report import to_markdown
from tests.chaos.storm import run

pytestmark = [pytest.mark.process, pytest.mark.chaos, pytest.mark.timeout(1200)]

SECONDS = 120.0
STREAMS = 16
TOKENS = (80, 300)  # of an answer


def test_every_stream_ends_and_equals_its_reference() -> None:
    """CHAOS_SEED repeats the faults of another run, as far as processes let it."""
    given = os.environ.get("CHAOS_SEED")
    seed = secrets.randbelow(2**32) if given is None else int(given)
    print(f"CHAOS_SEED={seed}", flush=True)
    report = run(seconds=SECONDS, streams=STREAMS, seed=seed, tokens=TOKENS)
    print(to_markdown(report))
    assert report.errors == [], f"CHAOS_SEED={seed}"
    assert report.sound
    assert sum(report.faults.values()) >= SECONDS / 10
    assert report.resumptions > 0, "no router's death reached a stream"
    assert set(report.by_client) == {"grpc", "http", "python"}
