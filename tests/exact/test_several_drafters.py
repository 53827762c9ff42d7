"""Several drafters of one session, with real models: whatever they guess and whoever dies, the text stays."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from outrider.sampling.params import SamplingParams
from tests.in_process import Answer, Cluster
from tests.tiny_models import build, near_copy

PROMPTS = [(5, 9, 30, 31, 7), (11, 12, 13, 14, 11, 12, 13, 14, 11, 12)]
MOST = 60
KILLED_AT = 20  # tokens of the first answer
PATIENCE_SECONDS = 2.0  # a step waits so long for drafts, lest it matters how busy the machine is
FEW = dict.fromkeys((11, 12, 13, 14), 20.0)  # tokens that the text is made of: so it repeats itself
GREEDY = SamplingParams(temperature=0.0, logit_bias=FEW)
SAMPLED = SamplingParams(temperature=0.8, presence_penalty=0.2, logit_bias=FEW, seed=3)


async def test_the_text_is_that_of_no_drafts_whichever_of_three_is_killed_in_the_middle(
    tmp_path: Path,
) -> None:
    """Two draft models, of which one is like the target, and suffix lookup."""
    target = build("llama", tmp_path / "target")
    near, other = near_copy(target, tmp_path / "near"), build("llama", tmp_path / "other", seed=7)
    cluster = Cluster(target, drafters_per_session=3, patience_seconds=PATIENCE_SECONDS)

    async def asked(sampling: SamplingParams, k: int | None = None, kill: Any = None) -> list[Answer]:
        killed = False

        async def on_tokens(output: list[int]) -> None:
            nonlocal killed
            if kill is not None and len(output) >= KILLED_AT and not killed:
                killed = True
                await kill.kill()

        asks = (
            cluster.ask(prompt, sampling, MOST, k=k, on_tokens=None if at else on_tokens)
            for at, prompt in enumerate(PROMPTS)
        )
        answers = list(await asyncio.gather(*asks))
        assert killed is (kill is not None)
        return answers

    async with cluster:
        plain = await asked(GREEDY, 0), await asked(SAMPLED, 0)
        first, _, looking_up = (
            await cluster.add_drafter(near),
            await cluster.add_drafter(other),
            await cluster.add_looking_up(),
        )
        found = [(plain[0], await asked(GREEDY, kill=first))]
        await cluster.add_drafter(near)
        found.append((plain[1], await asked(SAMPLED, kill=looking_up)))
        found.append((plain[0], await asked(GREEDY)))
    for without, answers in found:
        assert [one.tokens for one in answers] == [one.tokens for one in without]
        assert sum(one.steps for one in answers) < sum(one.steps for one in without)
    for source in ("near", "suffix"):
        assert sum(one.accepted_of.get(source, 0) for _, answers in found for one in answers) > 0, source


async def test_a_second_drafter_that_sends_garbage_costs_its_own_guesses_alone(tmp_path: Path) -> None:
    target, other = build("llama", tmp_path / "target"), build("llama", tmp_path / "other", seed=7)
    near = near_copy(target, tmp_path / "near")
    async with Cluster(target, drafters_per_session=2, patience_seconds=PATIENCE_SECONDS) as cluster:
        plain = await cluster.ask(PROMPTS[0], GREEDY, MOST, k=0)
        await cluster.add_drafter(near)
        await cluster.add_garbage_drafter(other)
        beside = [await cluster.ask(PROMPTS[0], GREEDY, MOST) for _ in range(2)]
    assert all(one.tokens == plain.tokens and one.steps < plain.steps for one in beside)
