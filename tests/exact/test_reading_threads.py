"""Prompts are read with the cores of drafters, too, which changes no text. Models and streams are real."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from outrider.sampling.params import SamplingParams
from tests.in_process import Cluster
from tests.tiny_models import build
from verifier.ways import WORTH_ALL, Ways

GREEDY = SamplingParams(temperature=0.0)
LONG, SHORT = [(7 * place) % 190 + 1 for place in range(WORTH_ALL)], [5, 17, 40]


async def test_only_steps_that_read_much_of_prompts_have_all_threads(tmp_path: Path) -> None:
    target = build("llama", tmp_path / "target")
    async with Cluster(target) as alone:
        expected = [(await alone.ask(prompt, GREEDY, 8)).tokens for prompt in (LONG, SHORT)]
    async with Cluster(target, compare=True) as cluster:
        stepper = cluster.verifier.stepper
        engine = stepper._engine
        usual, engine.resting_threads = engine.threads, engine.threads + 1
        stepper._ways = Ways(engine, None, random.Random(1).random)
        seen: list[tuple[int, int]] = []  # by step: its tokens, and torch's threads
        forward = engine.runner.logits

        def watched(prepared: Any) -> torch.Tensor:
            found = forward(prepared)
            seen.append((prepared.input_ids.numel(), torch.get_num_threads()))
            return found

        engine.runner.logits = watched
        found = [(await cluster.ask(prompt, GREEDY, 8)).tokens for prompt in (LONG, SHORT)]
    assert found == expected
    assert {threads for tokens, threads in seen if tokens >= WORTH_ALL} == {usual + 1}
    assert {threads for tokens, threads in seen if tokens < WORTH_ALL} == {usual}
