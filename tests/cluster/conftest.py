"""Four hosts for all tests here, and the text that the target alone gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.hosts import Host, switched
from tests.cluster.namespace import missing
from tests.e2e.conftest import Eventually as Eventually
from tests.e2e.conftest import alone as alone
from tests.e2e.conftest import eventually as eventually


@pytest.fixture(scope="session")
def hosts() -> Iterator[dict[str, Host]]:
    if reason := missing():
        pytest.skip(reason)
    with switched("front", "draft", "target", "spare") as made:
        yield made
