"""A bad drafter, then a good one beside it, with real models: sessions change to it and keep their text."""

from __future__ import annotations

import asyncio
from pathlib import Path

from outrider.sampling.params import SamplingParams
from tests.in_process import Answer, Cluster
from tests.tiny_models import build

SESSIONS, OUTPUT = 3, 240
GREEDY = SamplingParams(temperature=0.0)


async def test_sessions_that_began_with_a_bad_drafter_go_on_with_a_better_one(tmp_path: Path) -> None:
    target, other = build("llama", tmp_path / "target"), build("llama", tmp_path / "other", seed=7)
    joins: asyncio.Task[object] | None = None
    steps = with_bad = with_good = 0  # from the time on at which the good one is there

    async def on_tokens(output: list[int]) -> None:
        nonlocal joins, steps, with_bad, with_good
        if joins is None and len(output) >= 8:
            assert bad.placed == SESSIONS
            joins = asyncio.create_task(cluster.add_drafter(target))
        for drafter in cluster.fleet.drafters.values():
            if len(cluster.fleet.drafters) == 2:
                steps += drafter is bad
                with_bad += bad.placed if drafter is bad else 0
                with_good += drafter.placed if drafter is not bad else 0

    async with Cluster(target) as cluster:

        async def ask(hears: object = None) -> list[Answer]:
            asked = (cluster.ask([5, 6, 7 + at], GREEDY, OUTPUT, on_tokens=hears) for at in range(SESSIONS))
            return list(await asyncio.gather(*asked))

        plain = await ask()
        await cluster.add_drafter(other)
        (bad,) = cluster.fleet.drafters.values()
        both = await ask(on_tokens)
        assert joins is not None and joins.done()
    assert [answer.tokens for answer in both] == [answer.tokens for answer in plain]
    assert sum(answer.accepted for answer in both) > 0.2 * SESSIONS * OUTPUT
    # Of the session-steps: until the bad one is known, and in its trials.
    assert with_bad < with_good
