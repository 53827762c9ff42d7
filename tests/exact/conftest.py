"""What all tests of this room share: processes that models are divided among, and the target alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import alone as alone
from tests.e2e.conftest import eventually as eventually
from tests.follower_pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    running = Pool()
    yield running
    running.close()
