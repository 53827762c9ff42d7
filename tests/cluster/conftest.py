"""Four hosts for all tests here, and the text that the target alone gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.cluster.hosts import Host, switched
from tests.cluster.namespace import missing
from tests.e2e.conftest import Alone

PATIENCE_SECONDS = 240.0
Eventually = Callable[[Callable[[], bool], str], None]


@pytest.fixture(scope="session")
def hosts() -> Iterator[dict[str, Host]]:
    if reason := missing():
        pytest.skip(reason)
    with switched("front", "draft", "target", "spare") as made:
        yield made


@pytest.fixture(scope="session")
def alone() -> Alone:
    return Alone()


@pytest.fixture
def eventually() -> Eventually:
    """Waits for a condition, with a deadline that only a hang can reach."""

    def wait(condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < until, f"never happened: {what}"
            time.sleep(0.1)

    return wait
