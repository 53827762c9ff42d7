"""A GGUF file: what transformers leaves unread of it is used here, or the file is refused.

transformers passes by tensors and metadata that it has no place for, without a word: the model would be
another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import modeling_gguf_pytorch_utils as loader
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.engine.checkpoint import Checkpoint
from outrider.errors import StartupError

if TYPE_CHECKING:
    from gguf import GGUFReader

ROPE_FACTORS = "rope_freqs.weight"  # what each frequency is divided by, as llama.cpp writes Llama 3's scaling
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# What the arithmetic depends on, and what says that it does not.
SCALES = ("scale", "softcapping", "rope.scaling.type", "rope.scaling.factor")
NEUTRAL = ("none", 0, 1)
TAKEN_APART = (".ffn_gate_projs.weight", ".ffn_up_projs.weight", ".ffn_down_projs.weight", "output.weight")


@contextmanager
def _parsed_once() -> Iterator[None]:
    import gguf

    class Reader(gguf.GGUFReader):
        def __setattr__(self, name: str, value: Any) -> None:
            # A part of a numpy.memmap takes some times as long to make as one of an array.
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    dear = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, function in {**dear, "GGUFReader": Reader}.items():
        setattr(gguf, name, lru_cache(maxsize=1)(function))
    try:
        yield
    finally:
        for name, function in dear.items():
            setattr(gguf, name, function)


def parsed_once(checkpoint: Checkpoint) -> Any:
    """Returns a context within which a GGUF file is parsed once.

    transformers parses it for the configuration and again for the weights, two seconds each time with a
    vocabulary of 49,152, and makes the table of names anew for each module, five seconds in all."""
    return nullcontext() if checkpoint.gguf is None else _parsed_once()


def complete(config: Any, checkpoint: Checkpoint) -> None:
    """Sets what transformers left out of a file's configuration.

    Raises StartupError if the file tells of a scaling that cannot be set here."""
    reader = _reader(checkpoint)
    factors = next((tensor.data for tensor in reader.tensors if tensor.name == ROPE_FACTORS), None)
    if factors is not None:
        _scale_rotary(config, torch.tensor(factors), checkpoint)
    numbers = [value for value in config.to_dict().values() if isinstance(value, int | float)]
    for key, field in reader.fields.items():
        if key.startswith(("general.", "tokenizer.")) or not key.endswith(SCALES):
            continue
        value = field.contents()
        if value not in NEUTRAL and value not in numbers and config.model_type != "gpt_oss":
            raise StartupError(
                f"{checkpoint} has {key} = {value}, which transformers does not read from a GGUF file: the "
                "text would be another; give the model's safetensors"
            )


def unused(model: Any, checkpoint: Checkpoint) -> list[str]:
    """Returns the names of the file's tensors that the model was not given."""
    reader = _reader(checkpoint)
    kind = reader.fields["general.architecture"].contents()
    processor = loader.TENSOR_PROCESSORS.get(kind, loader.TensorProcessor)(config={})
    places = loader.get_gguf_hf_weights_map(model, processor)
    return [
        tensor.name
        for tensor in reader.tensors
        if not {tensor.name, tensor.name.removesuffix(".weight")} & places.keys()
        and not tensor.name.endswith(TAKEN_APART)
        and tensor.name != ROPE_FACTORS
    ]


def _reader(checkpoint: Checkpoint) -> GGUFReader:
    import gguf

    return gguf.GGUFReader(str(checkpoint))


def _scale_rotary(config: Any, factors: torch.Tensor, checkpoint: Checkpoint) -> None:
    """Raises StartupError if the factors are not those of Llama 3, which alone are written as a tensor."""
    if torch.all(factors == 1):
        return
    plain = getattr(config, "rope_parameters", None) or {}
    theta = plain.get("rope_theta")
    if theta and torch.all(factors >= 1) and torch.all(factors.isfinite()):
        config.rope_parameters = {**plain, **LLAMA3, "rope_type": "llama3", "factor": float(factors.max())}
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        head_dim = 2 * len(scaled)
        frequencies = theta ** -(torch.arange(0, head_dim, 2) / head_dim)
        if factors.shape == scaled.shape and torch.allclose(frequencies / factors, scaled, rtol=1e-4):
            return
    raise StartupError(
        f"{checkpoint} scales its rotary frequencies ({ROPE_FACTORS}) in a way that is not Llama 3's; give "
        "the model's safetensors"
    )
