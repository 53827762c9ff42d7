"""What a replica says of its worker's health, and what its worker is told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError

from deploy.args import parse
from deploy.workers import Replica, drafter_config, verifier_config
from outrider.errors import PeerLost, PeerRefused, StartupError, Unhealthy
from outrider.options.engine import EngineOptions, StepLimits
from outrider.options.option import options
from outrider.options.protection import TlsFiles


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
    pools = {"verifier": {**given, "tensor_parallel_size": 2, "drain_seconds": 5}, "drafter": given}
    told = parse({**pools, "insecure": True})
    verifier = verifier_config("T", "mine", told.verifier, told.network, "10.0.0.1")
    assert (verifier.served_names[0], verifier.drain_seconds) == ("mine", 5)
    assert verifier.engine.tensor_parallel_size == 2
    drafter = drafter_config("org/D", None, told.drafter, told.network, "10.0.0.1")
    assert (drafter.draft, drafter.engine.tensor_parallel_size) == ("org/D", 1)
    for config in (verifier, drafter):
        assert config.listen.advertised_address(9) == "10.0.0.1:9"
        engine = config.engine
        assert (engine.memory_for_kv, engine.threads, config.limits.prefill_chunk) == (2 * 2**30, 3, 64)
        assert (engine.device, engine.number_format) == ("cuda", "bfloat16")


def test_a_verifier_may_have_a_speculator_and_more_threads_while_drafters_rest() -> None:
    told = parse({"verifier.resting_threads": 4, "verifier.speculator": "S"})
    config = verifier_config("T", None, told.verifier, told.network, "127.0.0.1")
    assert (config.engine.threads, config.resting_threads, config.speculator) == (1, 4, "S")


def test_every_option_of_the_engine_and_of_its_steps_is_an_argument_of_a_pool() -> None:
    """With the same default; threads are the exception: the node's other cores are others'."""
    for group in (EngineOptions, StepLimits):
        for option in options(group):
            default = 1 if option.name == "threads" else option.default
            assert getattr(parse({}).verifier, option.name) == default
            assert getattr(parse({}).drafter, option.name) == default


def test_a_worker_listens_to_other_nodes_only_with_certificates_or_where_that_is_said_to_be_insecure() -> (
    None
):
    told = parse({})
    with pytest.raises(StartupError, match=r"--host 10\.0\.0\.1 is reached from other machines"):
        verifier_config("T", None, told.verifier, told.network, "10.0.0.1")
    assert drafter_config(None, "suffix", told.drafter, told.network, "127.0.0.1").propose == "suffix"
    assert drafter_config("D", None, told.drafter, told.network, "127.0.0.1").protection.tls is None


def test_with_certificates_a_worker_is_reached_by_a_name_that_they_can_hold() -> None:
    files = {"cert": "/tls/tls.crt", "key": "/tls/tls.key", "ca": "/tls/ca.crt"}
    told = parse({"tls": {**files, "domain": "outrider.pod.cluster.local"}})
    config = verifier_config("T", None, told.verifier, told.network, "10.0.0.1")
    assert config.listen.advertised_address(9) == "10-0-0-1.outrider.pod.cluster.local:9"
    assert config.protection.tls == TlsFiles(Path("/tls/tls.crt"), Path("/tls/tls.key"), Path("/tls/ca.crt"))
    by_address = parse({f"tls.{name}": path for name, path in files.items()})  # as on a command line
    config = verifier_config("T", None, by_address.verifier, by_address.network, "10.0.0.1")
    assert config.listen.advertised_address(9) == "10.0.0.1:9"
