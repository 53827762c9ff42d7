"""The shapes of the pair, and what a token costs each of them."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 8192


def target_config(vocabulary: int) -> LlamaConfig:
    """Returns the target: 6 layers of width 384, 6 query heads over 2 key-value heads."""
    return _shape(vocabulary, hidden_size=384, layers=6, intermediate_size=864, heads=6, head_dim=64)


def draft_config(vocabulary: int) -> LlamaConfig:
    """Returns the draft: width 128, so that its tied output layer leaves room for layers in a tenth of the
    cost."""
    return _shape(vocabulary, hidden_size=128, layers=3, intermediate_size=272, heads=4, head_dim=32)


def _shape(vocabulary: int, *, layers: int, heads: int, **sizes: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        **sizes,
    )


def build(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """Returns a model with random weights drawn from `seed`."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def parameter_count(model: nn.Module) -> int:
    """Returns the number of parameters, tied ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def matmul_parameters(model: LlamaForCausalLM) -> int:
    """Returns how many weights a token is multiplied with in one forward pass: every linear layer and the
    lm_head.

    Twice this is the multiply-add work a token costs, attention over the context left out. The
    embedding look-up is no multiplication and does not count; a tied lm_head does.
    """
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
