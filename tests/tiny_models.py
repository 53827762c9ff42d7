"""Tiny random checkpoints of many architectures, with a tokenizer, so that they can be served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from demo import pair
from demo.training.grow import choose_shape, grow

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
}
# model_type and what differs from BASE, by the name that tests use
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": 24,
            "attn_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": False,  # tied, the scaled embeddings would make it repeat itself
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": 24,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": False,  # tied, the scaled embeddings would make it repeat itself
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 1024, "n_inner": 96}),
    "phi3": ("phi3", {"pad_token_id": 0}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.3}),
    "gpt_neox": ("gpt_neox", {}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"attention_multiplier": 0.25, "residual_multiplier": 0.7, "logits_scaling": 2.0}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_next": (
        "qwen3_next",
        {
            "mlp_only_layers": [0, 1, 2],
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 32,
        },
    ),
}
ARCHITECTURES = list(CONFIGS)


def build(arch: str, folder: Path, seed: int = 0, vocab_size: int = 199, **overrides: Any) -> Path:
    """Saves a random fp32 model and a byte-level tokenizer (id 0 ends a text) to the folder and returns it.

    The weights are large enough that greedy text varies. The same arguments give the same weights."""
    model_type, special = CONFIGS[arch]
    torch.manual_seed(seed)
    values = {**BASE, **special, "vocab_size": vocab_size, "eos_token_id": 0, "bos_token_id": 0, **overrides}
    config = AutoConfig.for_model(model_type, **values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(folder)
    save_tokenizer(folder, vocab_size)
    return folder


def near_copy(target: Path, folder: Path, noise: float = 0.005) -> Path:
    """Saves a good draft to the folder and returns it: the target with a little noise on its weights."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=generator) * parameter.std().nan_to_num(0.0) * noise
            )
    model.save_pretrained(folder)
    for file in target.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def reciting(folder: Path, pieces: Sequence[str], template: str) -> Path:
    """Saves a model that says these pieces, whatever it is asked, and ends. No piece may come twice.

    Each is a token, and so is the last letter of the template. No layer changes what it reads, so that the
    last token alone says which one follows."""
    build("llama", folder, num_hidden_layers=1, tie_word_embeddings=False)
    fast = PreTrainedTokenizerFast.from_pretrained(folder)
    assert fast.add_tokens([AddedToken(piece) for piece in pieces]) == len(pieces)
    fast.chat_template = template
    fast.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.resize_token_embeddings(len(fast), mean_resizing=False)
    said = [fast.convert_tokens_to_ids(piece) for piece in (template[-1], *pieces, fast.eos_token)]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for before, after in pairwise(said):
            model.lm_head.weight[after] = 2 * torch.nn.functional.normalize(
                model.model.embed_tokens.weight[before], dim=0
            )
    model.save_pretrained(folder)
    return folder


def slow_demo_target(folder: Path) -> Path:
    """Saves the demo target grown to 60M parameters: it says the same, and its drafts are worth their way,
    however fast the machine is."""
    small = LlamaForCausalLM.from_pretrained(pair.TARGET, dtype=torch.float32)
    shape = choose_shape(small, 60_000_000, small.config.num_hidden_layers)
    grow(small, shape).save_pretrained(folder)
    AutoTokenizer.from_pretrained(pair.TARGET).save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, vocab_size: int = 199) -> None:
    """A byte-level BPE tokenizer of that many ids: <eos>, then bytes (as many as fit), then pairs of
    letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda symbol: (not symbol.isascii(), symbol))
    tokens = ["<eos>", *alphabet][:vocab_size]
    letters = list("etaoinshr")
    pairs = [(first, second) for first in letters for second in letters]
    merges = pairs[: max(0, vocab_size - len(tokens))]
    tokens += [first + second for first, second in merges]
    tokens += [f"<unused{index}>" for index in range(len(tokens), vocab_size)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<eos>")
    fast.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    )
    fast.save_pretrained(folder)


def with_other_tokens(
    model: Path, folder: Path, fewer: int = 0, more: int = 0, shift: int = 7, end: str = ""
) -> Path:
    """Saves a copy of a model with byte-level tokens to the folder and returns it. Its tokens have other ids;
    it lacks the `fewer` last merged ones, has `more` that no text has, and ends texts by `end`, if given."""
    shutil.copytree(model, folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    gone = {"".join(merge) for merge in merges[len(merges) - fewer :]}
    content["model"]["merges"] = merges[: len(merges) - fewer]
    kept = [vocabulary[token] for token in vocabulary if token not in gone]
    rows = kept[shift:] + kept[:shift]
    by_id = {id: token for token, id in vocabulary.items()}
    names = {by_id[id]: new for new, id in enumerate(rows)} | {
        f"<more{index}>": len(rows) + index for index in range(more)
    }
    for added in content["added_tokens"]:
        added["id"] = names[added["content"]]
    content["model"]["vocab"] = names
    told = json.dumps(content)
    config = (folder / "tokenizer_config.json").read_text()
    if end:
        former = content["added_tokens"][0]["content"]
        told, config = told.replace(former, end), config.replace(former, end)
    file.write_text(told)
    (folder / "tokenizer_config.json").write_text(config)

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    network.resize_token_embeddings(len(rows) + more, mean_resizing=False)
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for now, before in (
            (network.get_input_embeddings(), whole.get_input_embeddings()),
            (network.get_output_embeddings(), whole.get_output_embeddings()),
        ):
            now.weight[: len(rows)] = before.weight[torch.tensor(rows)]
            now.weight[len(rows) :] = 0.0
    for told_ends in (network.config, network.generation_config):
        told_ends.eos_token_id = told_ends.bos_token_id = content["added_tokens"][0]["id"]
    network.save_pretrained(folder)
    return folder
