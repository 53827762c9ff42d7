"""Mutual learning brings the pair together, averages as asked, and repeats itself for one seed."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from demo.training.corpus import Windows
from demo.training.distil import DistilOptions
from demo.training.mutual import MutualOptions, mutual

STREAM = torch.randint(1, 61, (4000,), generator=torch.Generator().manual_seed(0))


def tiny(seed: int) -> LlamaForCausalLM:
    """A random Llama with weights large enough that two seeds disagree."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def overlap(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> float:
    """Mean 1-TV on a stretch of the stream."""
    said, guessed = (model(input_ids=STREAM[None, :200]).logits.softmax(-1) for model in (target, draft))
    return float(torch.minimum(said, guessed).sum(-1).mean())


def train(kept: float, rounds: int = 2) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """A pair after some short rounds."""
    text = DistilOptions(rounds, rows=16, length=24, longest_prompt=12, batch_rows=8)
    target, draft = tiny(1), tiny(2)
    mutual(target, draft, Windows(STREAM, 0), MutualOptions(text, kept), seed=0)
    return target, draft


def weights(model: LlamaForCausalLM) -> Tensor:
    """All parameters in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_the_pair_comes_together() -> None:
    assert overlap(*train(kept=0.0, rounds=12)) > overlap(tiny(1), tiny(2)) + 0.05


def test_average_lies_between_the_first_and_the_last_weights() -> None:
    first, last = weights(tiny(1)), weights(train(kept=0.0)[0])
    assert float((last - first).abs().max()) > 1e-3
    assert torch.equal(weights(train(kept=1.0)[0]), first)
    assert torch.allclose(weights(train(kept=0.25)[0]), 0.25 * first + 0.75 * last, atol=1e-6)


def test_one_seed_gives_one_pair() -> None:
    for one, other in zip(train(kept=0.4), train(kept=0.4), strict=True):
        assert torch.equal(weights(one), weights(other))
