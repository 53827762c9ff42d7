"""What a divided model has on a GPU, as far as it runs on a CPU: compiled layers, steps that are repeated."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from outrider.engine import assembly
from outrider.engine.engine import Engine
from outrider.engine.fusing import fused, is_fused
from outrider.engine.parts import Parts
from outrider.engine.replayed import Replayed
from tests.engine.test_sharded import VOCAB, logits_of
from tests.follower_pool import Pool, divided


@pytest.fixture
def pool() -> Iterator[Pool]:
    running = Pool()
    yield running
    running.close()


def test_compiled_layers_meet_in_recorded_steps(
    pool: Pool,
    checkpoint: Callable[..., Path],
    engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on GPUs: the compiler leaves alone what ranks do together."""
    monkeypatch.setattr(assembly, "fused", partial(fused, backend="eager"))  # as the followers'
    parts = Parts(("reference",), "called-again", "packed", fused=True)
    tokens = [random.Random(1).randrange(VOCAB) for _ in range(90)]
    expected = logits_of(engine("llama"), tokens, [90])
    try:
        with divided(checkpoint("llama"), 2, pool.start, parts) as whole:
            assert is_fused(whole.model) and isinstance(whole.runner, Replayed)
            found = logits_of(whole, tokens, [90])
            assert float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())
            for chunks in ([1] * 12 + [78], [9, 1, 64, 1, 1, 14]):
                assert torch.equal(logits_of(whole, tokens, chunks), found), chunks
    finally:
        torch._dynamo.reset()
