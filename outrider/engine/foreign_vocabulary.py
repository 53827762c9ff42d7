"""A draft model made to read and guess the tokens of a target that has another tokenizer.

It guesses the tokens that both have, by the target's ids (token-level intersection: Timor et al., arXiv
2502.05202). A token that it does not have it reads as the mean of the tokens that spell it. What the model
gives is by the target's ids then, as if it had been trained on them: noise, masks and penalties fit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from outrider.engine.draft_vocabulary import reduce_output
from outrider.errors import ModelRefused
from outrider.vocabulary import Reading

MASK = "pard_token"  # in a configuration: see drafter/masks.py


def adopt(model: Any, reading: Reading, guessed: torch.Tensor | None = None) -> torch.Tensor:
    """Changes the model, and returns the target's ids [K], rising, that its logits are of.

    `guessed` are those of its own ids that it guesses; None: all. Raises ModelRefused if it cannot be
    changed."""
    embeddings, output = model.get_input_embeddings(), model.get_output_embeddings()
    rows, name = embeddings.weight.shape[0], type(model).__name__
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    if not embeddings.weight.is_floating_point() or not isinstance(output, nn.Linear):
        raise ModelRefused(f"{name} with such weights reads its own tokenizer's tokens only")
    if any(each is not embeddings and each.num_embeddings == rows for each in tables):
        raise ModelRefused(f"{name} has more tables than one by token, and reads its own tokenizer's only")
    mine = range(output.weight.shape[0]) if guessed is None else set(guessed.tolist())
    common = {theirs: ours for theirs, ours in reading.common.items() if ours in mine}
    if not common:
        raise ModelRefused(f"{name} and its target have no token in common")
    reduce_output(model, torch.tensor(list(common.values())))
    read = [tuple(one for one in each if one < rows) or (0,) for each in reading.read_as]
    if isinstance(mask := getattr(model.config, MASK, None), int) and 0 <= mask < rows:
        setattr(model.config, MASK, len(read))  # behind the target's ids
        read.append((mask,))
    flat = torch.tensor([one for each in read for one in each])
    starts = torch.tensor([0, *(len(each) for each in read[:-1])]).cumsum(0)
    whole = embeddings.weight.detach()
    mean = nn.functional.embedding_bag(
        flat.to(whole.device), whole.float(), starts.to(whole.device), mode="mean"
    )
    embeddings.weight = nn.Parameter(mean.to(whole.dtype), requires_grad=False)
    embeddings.num_embeddings = model.config.get_text_config().vocab_size = len(read)
    return torch.tensor(list(common))
