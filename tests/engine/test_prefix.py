"""A request that begins as an earlier one did runs only what is new of its prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from outrider.engine.engine import Step, Work
from outrider.sampling.params import SamplingParams
from tests.in_process import Cluster
from tests.tiny_models import build

PREFIX, REST, BLOCK = 1000, 24, 16


async def test_a_shared_prefix_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(2)
    prefix, *rests = ([rng.randrange(1, 199) for _ in range(length)] for length in (PREFIX, REST, REST))
    ran: list[int] = []
    async with Cluster(build("llama", tmp_path, max_position_embeddings=2048), kv_blocks=200) as cluster:
        engine = cluster.verifier.stepper._engine
        prepare = engine.prepare

        def counting(works: Sequence[Work]) -> Step:
            ran.append(sum(len(work.tokens) for work in works))
            step: Step = prepare(works)
            return step

        monkeypatch.setattr(engine, "prepare", counting)
        tokens, cached = [], []
        for rest in rests:
            answer = await cluster.ask(prefix + rest, SamplingParams(temperature=0.0), 1)
            tokens.append(sum(ran))
            cached.append(answer.cached_prompt_tokens)
            ran.clear()
    shared = PREFIX // BLOCK * BLOCK
    assert cached == [0, shared]
    assert tokens == [PREFIX + REST, PREFIX + REST - shared]
