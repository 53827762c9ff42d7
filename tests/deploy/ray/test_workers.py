"""What a replica says of its worker's health, and what its worker is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import RayActorError

from deploy.args import parse
from deploy.workers import Replica, drafter_config, verifier_config
from outrider.errors import PeerLost, PeerRefused, Unhealthy


class Worker:
    """Works until `end` has an error; `ill` is what its check finds."""

    def __init__(self) -> None:
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ill: Unhealthy | None = None
        self.checked: list[float] = []

    async def start(self) -> None: ...

    async def wait(self) -> None:
        await self.end

    async def check(self, seconds: float) -> None:
        self.checked.append(seconds)
        if self.ill is not None:
            raise self.ill


@pytest.fixture
async def worker() -> Worker:
    return Worker()


@pytest.fixture
async def replica(worker: Worker) -> Replica:
    replica = Replica()
    await replica._start(worker, 7.0)  # type: ignore[arg-type]
    return replica


async def test_a_worker_is_well_when_a_token_goes_through_its_model(replica: Replica, worker: Worker) -> None:
    await replica.check_health()
    assert worker.checked == [7.0]


async def test_one_that_is_slow_has_more_tries(replica: Replica, worker: Worker) -> None:
    worker.ill = Unhealthy("no token went through the model within 7 seconds")
    with pytest.raises(Unhealthy, match="no token"):
        await replica.check_health()


async def test_one_whose_follower_is_gone_is_dead(replica: Replica, worker: Worker) -> None:
    worker.ill = Unhealthy("follower 1 died")
    worker.ill.__cause__ = PeerLost("follower 1 died")
    with pytest.raises(RayActorError, match="follower 1 died"):
        await replica.check_health()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PeerRefused("another tokenizer"), "another tokenizer"),
        (ValueError("of some library"), "ValueError"),
        (None, "it was stopped"),
    ],
)
async def test_one_that_has_ended_is_dead(
    replica: Replica, worker: Worker, error: Exception | None, reason: str
) -> None:
    if error is None:
        worker.end.set_result(None)
    else:
        worker.end.set_exception(error)
    await asyncio.wait([replica._end])
    with pytest.raises(RayActorError, match=f"the worker has ended: {reason}"):
        await replica.check_health()
    assert worker.checked == []


def test_a_worker_is_told_what_its_pool_was_told() -> None:
    given: dict[str, Any] = {"kv_memory": "2GiB", "threads": 3, "device": "cuda", "prefill_chunk": 64}
    told = parse({"verifier": {**given, "tensor_parallel_size": 2, "drain_seconds": 5}, "drafter": given})
    verifier = verifier_config("T", "mine", told.verifier, "10.0.0.1")
    assert (verifier.served_name, verifier.drain_seconds, verifier.tensor_parallel_size) == ("mine", 5, 2)
    drafter = drafter_config("org/D", told.drafter, "10.0.0.1")
    assert (drafter.draft, drafter.tensor_parallel_size) == ("org/D", 1)
    for config in (verifier, drafter):
        assert config.advertised_address(9) == "10.0.0.1:9"
        assert (config.kv_memory_bytes, config.threads, config.prefill_chunk) == (2 * 2**30, 3, 64)
        assert (config.device, config.dtype) == ("cuda", "bfloat16")
