"""The tokens that a draft guesses, if they are fewer than its target has: a file of its checkpoint.

The checkpoint is an ordinary one of all tokens. A drafter keeps only those rows of the output layer, which is
most of a small model's work (Zhao et al., FR-Spec, arXiv 2502.14856); any other reader may pass the file by.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outrider.errors import StartupError

FILE = "draft_vocabulary.json"


def read(folder: Path, vocab_size: int) -> torch.Tensor | None:
    """Returns the ids [K], rising; None if the checkpoint names none. Raises StartupError."""
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        ids = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        ids = None
    whole = isinstance(ids, list) and bool(ids) and all(type(each) is int for each in ids)
    if not whole or ids[0] < 0 or ids[-1] >= vocab_size or any(a >= b for a, b in pairwise(ids)):
        raise StartupError(
            f"{file} is damaged: it must be a list of token ids that rise and are below {vocab_size}; "
            "distill the draft again, or remove the file to draft with all tokens"
        )
    return torch.tensor(ids)


def write(folder: Path, ids: Sequence[int]) -> None:
    """Writes the ids, which rise."""
    (folder / FILE).write_text(json.dumps(list(ids)))


def reduce_output(model: Any, ids: torch.Tensor) -> None:
    """Leaves only the rows of these ids [K] in a model's output layer: its logits are theirs, in their
    order."""
    whole = model.get_output_embeddings()
    head = nn.Linear(whole.weight.shape[1], len(ids), bias=False, device="meta")
    head.weight = nn.Parameter(whole.weight.detach()[ids].clone(), requires_grad=False)
    if whole.bias is not None:
        head.bias = nn.Parameter(whole.bias.detach()[ids].clone(), requires_grad=False)
    model.set_output_embeddings(head)
