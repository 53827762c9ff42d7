"""A draft model in 8 bits: nearly the same numbers, and the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from drafter.config import DrafterConfig
from outrider.engine.kv_blocks import BlockTable
from outrider.engine.loading import load_engine
from outrider.engine.quantized import Int8Linear, quantize
from outrider.engine.step_inputs import Work
from outrider.errors import StartupError
from outrider.options.option import build
from outrider.sampling.params import SamplingParams
from outrider_cli.children import Models, Workers, worker_children
from tests.in_process import Answer, Cluster

PROMPT = [(7 * i) % 198 + 1 for i in range(40)]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_a_rounded_engine_gives_nearly_the_same_logits(
    architecture: str, checkpoint: Callable[..., Path]
) -> None:
    logits = {}
    for quantization in (None, "int8"):
        engine = load_engine(str(checkpoint(architecture)), kv_memory_bytes=2**24, quantization=quantization)
        table = BlockTable()
        engine.pool.extend(table, len(PROMPT))
        logits[quantization] = engine.step([Work(table.blocks, 0, PROMPT, len(PROMPT))])
        assert engine.info.dtype == (quantization or "float32")
        assert engine.info.bit_exact == (quantization is None)
    apart = (logits["int8"] - logits[None]).norm() / logits[None].norm()
    assert 1e-4 < apart < 0.5  # rounded, which sharp random weights make much of, and no more than that


def test_no_linear_layer_stays_as_it_was() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(nn.Linear(64, 32), nn.Sequential(Conv1D(8, 32))).requires_grad_(False)
    expected = model(x)
    quantize(model)
    assert [type(module) for module in model.modules() if not list(module.children())] == [Int8Linear] * 2
    assert float((model(x) - expected).norm() / expected.norm()) < 0.05


async def test_the_answers_are_the_targets_own(checkpoint: Callable[..., Path]) -> None:
    async def answers(cluster: Cluster) -> list[Answer]:
        return await asyncio.gather(
            *(
                cluster.ask(PROMPT[:length], SamplingParams(temperature=temperature, seed=5), 150)
                for length, temperature in ((1, 0.0), (17, 0.8), (40, 0.0))
            )
        )

    target = checkpoint("llama")
    async with Cluster(target) as plain:
        expected = await answers(plain)
    async with Cluster(target) as cluster:
        await cluster.add_drafter(target, "int8")
        found = await answers(cluster)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
    accepted, verified = sum(answer.accepted for answer in found), sum(answer.verified for answer in found)
    assert accepted / verified > 0.5  # a good draft still


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"draft_quantization": "int4"}, "--draft-quantization must be one of int8, not 'int4'"),
        ({"device": "cuda", "dtype": "bfloat16"}, "--device cpu in float32, not cuda in bfloat16"),
        ({"dtype": "bfloat16"}, "not cpu in bfloat16"),
        ({"tensor_parallel_size": 2}, "a draft model in one process"),
    ],
)
def test_refused_where_it_cannot_be(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(StartupError, match=sentence):
        build(DrafterConfig, {"draft": "draft", "draft_quantization": "int8", **settings})


def test_serve_hands_it_to_its_drafters_alone() -> None:
    workers = Workers(verifiers=1, drafters=1, draft_quantization="int8")
    verifier, drafter = worker_children(Models("T", "D", "n"), workers, "127.0.0.1:1")
    assert "--draft-quantization" not in verifier.command
    assert drafter.command[-2:] == ("--draft-quantization", "int8")
