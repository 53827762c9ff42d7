"""Verifiers of one checkpoint in two number formats: a text goes on in its own while there is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.sampling.params import SamplingParams
from tests.in_process import Cluster
from tests.tiny_models import build

TOKENS = 40
SAMPLING = SamplingParams(temperature=0.9, seed=3)


@pytest.mark.parametrize("alike", [True, False])
async def test_a_lost_verifier_s_text_goes_on(tmp_path: Path, alike: bool) -> None:
    async with Cluster(build("llama", tmp_path / "target")) as cluster:
        expected = (await cluster.ask([5, 6, 7], SAMPLING, TOKENS)).tokens
        first = cluster.verifier

        async def lose(tokens: list[int]) -> None:
            if len(tokens) >= TOKENS // 2 and first.tasks:
                first.tasks[0].cancel()  # it stands still, and does not end before the others come
                if alike:
                    await cluster.add_verifier()
                await cluster.add_verifier("bfloat16")
                await first.kill()
                first.tasks.clear()

        found = (await cluster.ask([5, 6, 7], SAMPLING, TOKENS, on_tokens=lose)).tokens
        numerics = cluster.sessions.models()[0].numerics
        changes = cluster.fleet.metrics.registry.get_sample_value(
            "outrider_numerics_changes_total", {"model_name": "target"}
        )
        assert not first.tasks and len(found) == TOKENS
        assert {name.split("-")[0] for name in numerics} == (
            {"bfloat16", "float32"} if alike else {"bfloat16"}
        )
        assert (changes == 1) is not alike
        if alike:
            assert found == expected
