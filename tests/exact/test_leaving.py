"""A client that leaves frees its session on every worker."""

from __future__ import annotations

import asyncio
from pathlib import Path

from outrider.sampling.params import SamplingParams
from tests.in_process import Cluster
from tests.tiny_models import build


async def test_requests_that_are_abandoned_leave_nothing_behind(tmp_path: Path) -> None:
    target = build("llama", tmp_path / "target")
    async with Cluster(target) as cluster:
        drafter = await cluster.add_drafter(target)
        under_way = asyncio.Event()

        async def note(tokens: list[int]) -> None:
            if len(tokens) > 10:
                under_way.set()

        asked = [
            asyncio.create_task(cluster.ask([seed] * 20, SamplingParams(seed=seed), 900, on_tokens=note))
            for seed in range(1, 6)
        ]
        await under_way.wait()
        verifier, drafting = cluster.verifier.stepper, drafter.stepper
        assert verifier.load.running == 5 and drafting.load.sessions == 5
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        async with asyncio.timeout(120):  # only a leak can reach it
            while verifier.load.running or drafting.load.sessions:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for stepper in (verifier, drafting):
            assert stepper.load.kv_usage == 0
            stepper._engine.pool.check_integrity([])
