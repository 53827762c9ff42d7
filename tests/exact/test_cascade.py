"""A draft model that checks what its session's text has had before takes fewer steps; no text changes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.sampling.params import SamplingParams
from tests.in_process import Answer, Cluster, Worker
from tests.tiny_models import build

TEXT = list(range(10, 90))
COPY = dict(zip(TEXT, [*TEXT[1:], TEXT[0]], strict=True))
EDIT = {**COPY, 30: 150, 150: 151, 151: 34, 60: 63, 80: 152, 152: 81}  # a passage changed, one less, one more
OUTPUT, K = 240, 8
GREEDY, DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, seed=3)


def following(folder: Path, after: Mapping[int, int]) -> Path:
    """Saves a model that says after each token the one that is told."""
    build("llama", folder, num_hidden_layers=1, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for before, next_one in after.items():
            seen = torch.nn.functional.normalize(model.model.embed_tokens.weight[before], dim=0)
            model.lm_head.weight[next_one] += 2 * seen
    model.save_pretrained(folder)
    return folder


def counted(worker: Worker) -> list[int]:
    """Returns a list to which each forward of the drafter adds its tokens."""
    forwards: list[int] = []
    engine = worker.stepper._engine
    prepare = engine.prepare

    def count(works: Any) -> Any:
        forwards.append(sum(len(work.tokens) for work in works))
        return prepare(works)

    engine.prepare = count
    return forwards


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
async def test_a_text_that_is_copied_with_changes_takes_fewer_steps_of_the_draft_model(
    tmp_path: Path, sampling: SamplingParams
) -> None:
    target, draft = following(tmp_path / "target", EDIT), following(tmp_path / "draft", COPY)
    async with Cluster(target, k=K) as cluster:
        expected = await cluster.ask(TEXT, sampling, OUTPUT)
        worker = await cluster.add_drafter(draft)
        forwards = counted(worker)
        seen: dict[bool, tuple[Answer, int]] = {}
        for cascade in (False, True):
            worker.stepper._cascade = cascade
            forwards.clear()
            seen[cascade] = await cluster.ask(TEXT, sampling, OUTPUT), len(forwards)
    (alone, steps), (checked, fewer) = seen[False], seen[True]
    assert alone.tokens == checked.tokens == expected.tokens
    assert fewer < 0.6 * steps
    assert checked.steps < alone.steps  # the target's; what share is accepted depends on how many are guessed
    assert checked.accepted > 0.9 * alone.accepted
