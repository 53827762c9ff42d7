"""Two drafters, each good at one kind of requests, with real models: each gets those, and no text changes."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from outrider.sampling.params import SamplingParams
from tests.in_process import Cluster
from tests.tiny_models import build

OUTPUT, LEARNING, SESSIONS = 80, 10, 22
WORDS = [range(10, 40), range(100, 130)]  # of each kind
BIAS = 100.0  # for an answer of the prompt's kind


def deaf(target: Path, folder: Path, words: range) -> Path:
    """Saves a draft that is the target, but guesses of these words the one that is least likely."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight[words.start : words.stop] *= -1
    model.save_pretrained(folder)
    for file in target.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


async def test_each_drafts_for_what_it_is_good_at(tmp_path: Path) -> None:
    target = build("llama", tmp_path / "target", tie_word_embeddings=False)
    rng, asked = random.Random(1), list[tuple[list[int], SamplingParams]]()
    for number in range(SESSIONS):
        words = WORDS[number % 2]
        sampling = SamplingParams(temperature=0.0, logit_bias=dict.fromkeys(words, BIAS))
        asked.append(([rng.choice(words) for _ in range(60)], sampling))
    async with Cluster(target, patience_seconds=0.05) as cluster:
        plain = await asyncio.gather(*(cluster.ask(*each, OUTPUT) for each in asked))
        for number, words in enumerate(WORDS):
            await cluster.add_drafter(deaf(target, tmp_path / str(number), words))
        drafted = [await cluster.ask(prompt, sampling, OUTPUT) for prompt, sampling in asked]
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
    rates = [answer.accepted / max(1, answer.verified) for answer in drafted]
    learned = rates[LEARNING:]
    assert sum(learned) > 0.7 * len(learned)  # but for trials; without learning it is half
