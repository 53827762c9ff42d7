"""Whether this machine's kernels give a row the same bits whatever runs beside it. Measured, on random
numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from outrider.engine.attention import LayerAttention, RunningStep, attend
from outrider.engine.kv_pools import KvPools
from outrider.engine.packed import PackedLinear
from outrider.engine.step_inputs import Work, build_step

ROWS = (1, 2, 5, 17, 64, 130, 300)  # row counts of linear layers that must agree
CHUNKS = (60, 1, 9, 60, 1, 200, 180, 1, 1, 17)  # tokens in steps that must agree with all in one
WINDOW = 100  # for layers with a sliding window, so that keys before it are left out
BLOCK = 16
# First blocks that follow one another, whose keys are read where they lie, then some that do not.
SCATTERED = [*range(10), *reversed(range(10, -(-sum(CHUNKS) // BLOCK)))]


def linears_keep_bits(model: nn.Module) -> bool:
    """Tries one packed layer of each shape."""
    layers = {
        (layer.in_features, layer.out_features): layer
        for layer in model.modules()
        if isinstance(layer, PackedLinear)
    }
    with torch.inference_mode():
        for layer in layers.values():
            x = torch.randn(max(ROWS), layer.in_features, generator=torch.Generator().manual_seed(1))
            whole = layer.forward(x)  # without what joins it to other ranks
            if any(not torch.equal(layer.forward(x[:rows]), whole[:rows]) for rows in ROWS):
                return False
    return True


def attention_keeps_bits(layers: Iterable[LayerAttention]) -> bool:
    """Tries each way to attend, with more keys than the model's own check has."""
    ways = {replace(how, window=how.window and WINDOW) for how in layers}
    with torch.inference_mode():
        return all(
            torch.equal(_attended(how, CHUNKS, SCATTERED), _attended(how, [sum(CHUNKS)], sorted(SCATTERED)))
            for how in ways
        )


def _attended(how: LayerAttention, chunks: Iterable[int], blocks: Sequence[int]) -> torch.Tensor:
    total = sum(CHUNKS)
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(how.query_heads, total, how.width, generator=generator)
    key = torch.randn(how.key_heads, total, how.width, generator=generator)
    value = torch.randn(how.key_heads, total, how.value_width, generator=generator)
    pools = KvPools(len(blocks), BLOCK)
    found, start = [], 0
    for chunk in chunks:
        inputs = build_step(
            [Work(blocks, start, [0] * chunk, 0)],
            block_size=BLOCK,
            scratch_block=pools.scratch_block,
            device=torch.device("cpu"),
            mask_dtype=torch.float32,
            windows=(how.window,),
        )
        run = slice(start, start + chunk)
        found.append(attend(RunningStep(inputs, pools), 0, query[:, run], key[:, run], value[:, run], how))
        start += chunk
    return torch.cat(found)
