"""The embeddings that a draft's checkpoint leaves out, as they are its target's: most of a small model."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from safetensors import safe_open

from outrider.engine.checkpoint import Checkpoint, locate, weight_files
from outrider.errors import StartupError

MARK = "embeddings_of_target"  # in config.json
INPUT, OUTPUT = "token_embd.weight", "output.weight"  # as GGUF files call them


def leave_out(model: Any) -> dict[str, str]:
    """Marks a model as one whose checkpoint is without its embeddings and tokenizer, and returns the names of
    those matrices."""
    setattr(model.config, MARK, True)
    return _embeddings(model)


def are_lent(config: Any, draft: object, lent: object) -> bool:
    """Returns whether a draft's embeddings and tokenizer are its target's. Raises StartupError if nothing is
    `lent`."""
    needed = bool(getattr(config, MARK, False))
    if needed and lent is None:
        raise StartupError(f"{draft} leaves its embeddings and tokenizer to its target: name it by --target")
    return needed


def check_undivided(config: Any, draft: object) -> None:
    """Raises StartupError for a draft whose embeddings are its target's: they are not lent in parts."""
    if getattr(config, MARK, False):
        raise StartupError(
            f"{draft} leaves its embeddings to its target, and cannot be divided: leave out "
            "--tensor-parallel-size"
        )


def _embeddings(model: Any) -> dict[str, str]:
    """Returns the names of the matrices, and what each is. If they are tied, both are the input's."""
    output = model.get_output_embeddings()
    kinds = {} if output is None else {id(output.weight): OUTPUT}
    kinds[id(model.get_input_embeddings().weight)] = INPUT
    named = model.named_parameters(remove_duplicate=False)
    return {name: kinds[id(parameter)] for name, parameter in named if id(parameter) in kinds}


def borrow(model: Any, missing: Collection[str], lender: str) -> list[str]:
    """Fills those of the missing tensors that are embeddings from the checkpoint of a draft's target, and
    returns what is missing still. Raises StartupError if the target has none of that shape."""
    kinds = _embeddings(model)
    for kind in sorted({kinds[name] for name in missing if name in kinds}):
        names = [name for name, is_kind in kinds.items() if is_kind == kind]
        weight, checkpoint = model.get_parameter(names[0]), locate(lender)
        found = _read(checkpoint, names, kind)
        if found is None or found.shape != weight.shape:
            there = "none" if found is None else f"one of {list(found.shape)}"
            raise StartupError(
                f"the draft leaves {names[0]} of {list(weight.shape)} to its target, and {checkpoint} has "
                f"{there}: name the target that the draft was made for"
            )
        with torch.no_grad():
            weight.copy_(found)
    return sorted(set(missing) - kinds.keys())


def _read(checkpoint: Checkpoint, names: Collection[str], in_gguf: str) -> torch.Tensor | None:
    if checkpoint.gguf is not None:
        import gguf

        for tensor in gguf.GGUFReader(str(checkpoint)).tensors:
            if tensor.name == in_gguf:
                return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        return None
    for file in weight_files(checkpoint.folder):
        with safe_open(file, framework="pt") as weights:
            for name in set(names) & set(weights.keys()):
                found: torch.Tensor = weights.get_tensor(name)
                return found
    return None
