"""Grows a Llama checkpoint to a realistic cost without changing what it computes.

    python demo/training/grow.py --source demo/models/target --out DIR --parameters 205M

A benchmark of speculative decoding needs a target whose forward pass costs what a real one costs, and
a draft that predicts it well. Training such a target takes days; growing a small one takes a minute:

* Depth. A decoder layer adds to the residual stream h the outputs of two blocks: h + o_proj(...) and
  then h + down_proj(...). In an added layer both projections are zero, so it adds exactly zero,
  whatever its other weights are, and h passes unchanged.
* Width. The MLP is down_proj(silu(gate_proj h) * up_proj h), a sum over its inner channels. Added
  channels have random gate and up rows, and zero columns in down_proj: each adds zero times a finite
  number. The old channels keep their weights.

Hidden size, heads, embedding, norms and lm_head stay, so the logits are equal; only the order in which
a matrix product sums its terms can differ with its size, by rounding. Every added weight is stored and
multiplied like any other: the result is an ordinary dense Llama checkpoint to any engine.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from demo.training.progress import CONSOLE
from demo.training.shapes import parameter_count

MOST_LAYERS = 24
MLP_MULTIPLE = 32  # keeps every slice of the MLP aligned, split over up to eight workers as well


@dataclass(frozen=True)
class Shape:
    """The two sizes that grow."""

    layers: int
    mlp: int


def parse_count(text: str) -> int:
    """Reads `205M`, `1.2B`, `900K` or plain digits as a number of parameters."""
    units = {"K": 10**3, "M": 10**6, "B": 10**9}
    unit = units.get(text.strip()[-1:].upper(), 0)
    try:
        return round(float(text.strip()[:-1]) * unit) if unit else int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number of parameters such as 205M or 1.2B") from None


def choose_shape(source: LlamaForCausalLM, parameters: int, layers: int | None = None) -> Shape:
    """Returns the depth and MLP width that come closest to `parameters`: first up to 24 layers deep, then
    wider."""
    config = source.config
    layer = parameter_count(source.model.layers[0])
    channel = 3 * config.hidden_size  # weights an inner channel has in gate, up and down
    rest = parameter_count(source) - config.num_hidden_layers * layer
    if parameters < parameter_count(source):
        raise ValueError(f"the source already has {parameter_count(source):,} parameters")
    depth = layers or max(config.num_hidden_layers, min(MOST_LAYERS, (parameters - rest) // layer))
    if depth < config.num_hidden_layers:
        raise ValueError(f"{depth} layers are fewer than the source's {config.num_hidden_layers}")
    bare = layer - channel * config.intermediate_size
    channels = ((parameters - rest) / depth - bare) / channel
    return Shape(depth, max(config.intermediate_size, MLP_MULTIPLE * round(channels / MLP_MULTIPLE)))


def places(old: int, new: int) -> list[int]:
    """Returns the index among `new` layers of each of the `old` layers, spread evenly with the first one
    first."""
    return [index * new // old for index in range(old)]


@torch.no_grad()
def grow(source: LlamaForCausalLM, shape: Shape, seed: int = 0) -> LlamaForCausalLM:
    """Returns a model of the given depth and MLP width that computes the same logits as `source`."""
    grown = empty_copy(source, shape, seed)
    grown.model.embed_tokens.weight.copy_(source.model.embed_tokens.weight)
    grown.model.norm.weight.copy_(source.model.norm.weight)
    if not source.config.tie_word_embeddings:
        grown.lm_head.weight.copy_(source.lm_head.weight)
    origin = dict(
        zip(places(len(source.model.layers), len(grown.model.layers)), source.model.layers, strict=True)
    )
    for index, layer in enumerate(grown.model.layers):
        old = origin.get(index)
        if old is None:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                for parameter in projection.parameters():
                    parameter.zero_()
            continue
        width = old.mlp.gate_proj.out_features
        for name, parameter in layer.named_parameters():
            kept = old.get_parameter(name)
            if name == "mlp.down_proj.weight":
                parameter.zero_()
                parameter[:, :width] = kept
            elif name.startswith(("mlp.gate_proj", "mlp.up_proj")):
                parameter[:width] = kept
            else:
                parameter.copy_(kept)
    return grown


def empty_copy(source: LlamaForCausalLM, shape: Shape, seed: int) -> LlamaForCausalLM:
    """Returns a randomly initialised float32 model like `source` but of the given depth and MLP width."""
    config: LlamaConfig = copy.deepcopy(source.config)
    config.num_hidden_layers, config.intermediate_size = shape.layers, shape.mlp
    config.dtype = torch.float32
    torch.manual_seed(seed)
    grown = LlamaForCausalLM(config).eval()
    grown.generation_config = copy.deepcopy(source.generation_config)
    return grown


@torch.no_grad()
def largest_difference(one: LlamaForCausalLM, other: LlamaForCausalLM, ids: Tensor) -> float:
    """Returns the largest absolute difference between two models' logits on ids [rows, length]."""
    logits = [model(input_ids=ids, use_cache=False).logits.float() for model in (one, other)]
    return float((logits[0] - logits[1]).abs().max())


def main(
    source: Annotated[Path, typer.Option(help="Folder of the Llama checkpoint to grow.")],
    out: Annotated[Path, typer.Option(help="Folder to write the grown checkpoint to.")],
    parameters: Annotated[str, typer.Option(help="Size to reach, such as 205M or 1.2B.")] = "205M",
    layers: Annotated[int, typer.Option(help="Number of layers; 0 chooses up to 24.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the added weights.")] = 0,
    tolerance: Annotated[float, typer.Option(help="Largest difference of a logit to accept.")] = 1e-4,
) -> None:
    """Write a larger checkpoint that computes the same function as SOURCE, and check that it does."""
    small = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    try:
        shape = choose_shape(small, parse_count(parameters), layers or None)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    CONSOLE.print(f"{shape.layers} layers, MLP of {shape.mlp}, hidden size {small.config.hidden_size}")
    grown = grow(small, shape, seed)
    grown.save_pretrained(out)
    AutoTokenizer.from_pretrained(source).save_pretrained(out)
    written = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(small.config.vocab_size, (2, 128), generator=generator)
    difference = largest_difference(small, written, ids)
    CONSOLE.print(f"{parameter_count(written):,} parameters written to {out}")
    CONSOLE.print(f"largest difference of a logit on {ids.numel()} random tokens: {difference:.2e}")
    if difference > tolerance:
        CONSOLE.print(f"that is more than {tolerance:g}: the checkpoint does not compute the same function")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
