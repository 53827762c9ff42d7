"""Records of workers, and a Redis for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from outrider.wire.description import ModelInfo, WorkerInfo, WorkerRecord
from outrider.wire.hello import Identity, Role
from outrider.wire.load import VerifierLoad
from tests.redis_server import RedisServer


@pytest.fixture(scope="session")
def redis_of_all() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def ttl_seconds() -> float:
    """For which a record outlives its last beat: on a busy machine a test takes long. A test in which one
    expires has another."""
    return 3600.0


@pytest.fixture
def record() -> Callable[..., WorkerRecord]:
    """A worker's, by its id."""

    def make(
        worker_id: str = "v",
        incarnation: int = 2**64 - 1,
        address: str = "h:1",
        role: Role = Role.VERIFIER,
        **load: float,
    ) -> WorkerRecord:
        identity = Identity(role, worker_id, incarnation, "weights", "tokens")
        model = ModelInfo("m", "weights", "Arch", 1, 2, 3, (4, 5), "cpu", "float32", True, 2)
        measured = VerifierLoad(**load) if role is Role.VERIFIER else None
        return WorkerRecord(WorkerInfo(identity, model, 6, 7), address, measured)

    return make
