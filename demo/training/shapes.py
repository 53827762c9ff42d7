"""The shapes of the pair and what one token costs each of them."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 8192


def _shape(
    width: int,
    layers: int,
    mlp: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocabulary: int,
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )


def target_config(vocabulary: int) -> LlamaConfig:
    """Returns the target: 6 layers of width 384, 6 query heads over 2 key-value heads."""
    return _shape(384, 6, 864, 6, 2, 64, vocabulary)


def draft_config(vocabulary: int) -> LlamaConfig:
    """Returns the draft: width 128, so that its tied output layer leaves room for layers in a tenth of the
    cost."""
    return _shape(128, 3, 272, 4, 2, 32, vocabulary)


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
