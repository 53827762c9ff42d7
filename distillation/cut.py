"""A draft cut from its target: some of its layers, and its embeddings as they are."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from outrider.engine import draft_vocabulary, lent_embeddings
from outrider.errors import StartupError


def usual_layers(count: int) -> int:
    """Returns how many layers a draft has if nobody chose."""
    return max(1, count // 6)


def chosen_layers(count: int, kept: int) -> list[int]:
    """Returns which of `count` layers a draft of `kept` has: evenly spread, first and last included."""
    if kept == 1:
        return [0]
    return [round(index * (count - 1) / (kept - 1)) for index in range(kept)]


def cut(target: Any, layers: Sequence[int]) -> Any:
    """Returns a model of these layers of the target, with all else that the target has.

    Raises StartupError if the target is not made of a list of layers."""
    config, count = copy.deepcopy(target.config), target.config.num_hidden_layers
    name = _layers_of(target, count)
    config.num_hidden_layers = len(layers)
    if hasattr(config, "quantization_config"):  # the draft's numbers are not the file's
        del config.quantization_config
    for key, value in list(config.to_dict().items()):
        if isinstance(value, list) and len(value) == count and key.startswith("layer"):
            setattr(config, key, [value[layer] for layer in layers])
    draft = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    weights = target.state_dict()
    with torch.no_grad():
        for key, tensor in draft.state_dict().items():
            if key.startswith(f"{name}."):
                index, _, rest = key.removeprefix(f"{name}.").partition(".")
                key = f"{name}.{layers[int(index)]}.{rest}"
            tensor.copy_(weights[key])
    draft.generation_config = target.generation_config
    return draft


def freeze(draft: Any) -> list[nn.Parameter]:
    """Leaves the embeddings as the target's, and returns the parameters that learn."""
    draft.requires_grad_(True)
    for embedding in (draft.get_input_embeddings(), draft.get_output_embeddings()):
        embedding.requires_grad_(False)
    return [parameter for parameter in draft.parameters() if parameter.requires_grad]


def frequent(texts: Iterable[Sequence[int]], count: int, vocab_size: int, always: Iterable[int]) -> list[int]:
    """Returns the ids, rising, of the `count` most frequent tokens and of those that are needed always; of
    tokens that never occur the lowest ids, which are the most frequent ones of most tokenizers."""
    seen = Counter(token for ids in texts for token in ids)
    must = set(always)
    ranked = sorted(range(vocab_size), key=lambda token: (token not in must, -seen[token], token))
    return sorted(ranked[: max(count, len(must))])


def save(draft: Any, tokenizer: Any, vocabulary: Sequence[int], folder: Path, slim: bool) -> None:
    """Writes the draft in bfloat16, with its tokenizer and its vocabulary; a `slim` one without what is its
    target's."""
    small = copy.deepcopy(draft).to(torch.bfloat16)
    targets = lent_embeddings.leave_out(small) if slim else {}
    small.save_pretrained(
        folder, state_dict={name: value for name, value in small.state_dict().items() if name not in targets}
    )
    if not slim:
        tokenizer.save_pretrained(folder)
    if len(vocabulary) < draft.get_input_embeddings().weight.shape[0]:
        draft_vocabulary.write(folder, vocabulary)


def _layers_of(model: Any, count: int) -> str:
    name: str
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name
    raise StartupError(f"{type(model).__name__} is not made of a list of layers: no draft can be cut from it")
