"""Text written in batches is what the model would write alone, with the logits it would give."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from demo.training.generation import continue_one, continue_rows


@pytest.fixture
def model() -> LlamaForCausalLM:
    """A random Llama with grouped-query attention, large weights so that its argmax varies."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def test_rows_match_a_full_pass(model: LlamaForCausalLM) -> None:
    prompts = torch.arange(12).reshape(4, 3) % 61
    sampled = torch.tensor([False, True, False, True])
    expected = [continue_one(model, prompt, 17, eos=-1) for prompt in prompts]
    ids, logits = continue_rows(model, prompts, 20, sampled, torch.Generator().manual_seed(0))
    for row in (0, 2):
        assert torch.equal(ids[row], expected[row])
    whole = model(input_ids=ids[:, :-1], use_cache=False).logits
    assert torch.allclose(logits, whole, atol=1e-4)
    assert not torch.equal(ids[1], expected[1])


@torch.no_grad()
def test_noise_draws_with_the_models_probabilities(model: LlamaForCausalLM) -> None:
    prompt = torch.tensor([5, 9, 2])
    wanted = model(input_ids=prompt[None]).logits[0, -1].softmax(-1)
    noise = -torch.empty(4000, 61).exponential_(generator=torch.Generator().manual_seed(0)).log()
    logits = model(input_ids=prompt[None]).logits[0, -1]
    counts = torch.bincount((logits + noise).argmax(-1), minlength=61) / 4000
    assert float((counts - wanted).abs().sum()) / 2 < 0.05
    drawn = continue_one(model, prompt, 1, eos=-1, noise=noise[:1])
    assert int(drawn[-1]) == int((logits + noise[0]).argmax())
