"""Greedy output equals the target's own, for many architectures and whatever the drafter does."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.sampling.params import SamplingParams
from tests.in_process import PATIENCE_SECONDS, Answer, Cluster
from tests.tiny_models import build, near_copy

GREEDY = SamplingParams(temperature=0.0)
LENGTHS = (1, 2, 7, 16, 17, 33, 40, 64)  # around the block size, and enough for sliding windows to matter
MAX_TOKENS = 24
VOCAB = 199
# That differ in what an engine does for them; `make zoo` serves all that there are.
ARCHITECTURES = ("llama", "mistral", "gemma3", "gpt2", "phi3", "opt", "gpt_neox", "mixtral")
DRAFTERS = ("good", "none", "bad", "garbage")
ALL_DRAFTERS = ("llama", "gemma3")  # a wrong draft does the same to every architecture


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]


def reference(target: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        done = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=MAX_TOKENS, pad_token_id=0
        )
        outputs.append(done[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_greedy_output_equals_generate(architecture: str, tmp_path: Path) -> None:
    target = build(architecture, tmp_path / "target")
    expected = reference(target)
    accepted: dict[str, int] = {}
    for drafter in DRAFTERS if architecture in ALL_DRAFTERS else DRAFTERS[:1]:
        # One that is never right soon says little, and its silence is waited for.
        patience = 0.5 if drafter == "bad" else PATIENCE_SECONDS
        async with Cluster(target, patience_seconds=patience) as cluster:
            if drafter == "good":
                await cluster.add_drafter(near_copy(target, tmp_path / "good"))
            elif drafter == "bad":
                await cluster.add_drafter(build(architecture, tmp_path / "bad", seed=99))
            elif drafter == "garbage":
                await cluster.add_garbage_drafter(target)
            answers: list[Answer] = await asyncio.gather(
                *(cluster.ask(prompt, GREEDY, MAX_TOKENS) for prompt in prompts())
            )
        for length, answer, tokens in zip(LENGTHS, answers, expected, strict=True):
            assert answer.tokens == tokens, f"{drafter} draft, prompt of {length}"
        accepted[drafter] = sum(answer.accepted for answer in answers)
        verified = sum(answer.verified for answer in answers)
        assert (verified > 0) is (drafter != "none"), f"of the {drafter} draft, {verified} were verified"
    assert accepted["good"] > accepted.get("bad", 0) >= accepted.get("none", 0) == 0
