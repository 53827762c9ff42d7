from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from outrider.net.descriptors import descriptors
from tests.worker.test_worker import Busy, worker_of

KIND = resource.RLIMIT_NOFILE


@pytest.fixture
def few() -> Iterator[int]:
    """Returns the hard limit; the soft one is lower meanwhile."""
    soft, hard = resource.getrlimit(KIND)
    resource.setrlimit(KIND, (512, hard))
    yield hard
    resource.setrlimit(KIND, (soft, hard))


def test_a_process_takes_as_many_descriptors_as_it_may(few: int) -> None:
    assert descriptors() == few == resource.getrlimit(KIND)[0]


async def test_a_worker_does(few: int) -> None:
    worker = worker_of(Busy())
    await worker.start()
    assert resource.getrlimit(KIND)[0] == few
    await worker.stop()
