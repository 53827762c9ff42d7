"""Whether this machine's kernels give a row the same bits whatever runs beside it. Measured, on random
numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from outrider.engine.attention import LayerAttention
from outrider.engine.kv_pools import KvPools
from outrider.engine.packed import PackedLinear
from outrider.engine.sdpa import attend
from outrider.engine.step_inputs import KEY_BLOCK, KEY_MULTIPLE, RowBatching, Work, build_step

ROWS = (1, 2, 5, 17, 64, 130, 300)  # row counts of linear layers that must agree
CHUNKS = (60, 1, 9, 60, 1, 200, 180, 1, 1, 17, 230, 1, 5, 250, 2)  # in steps that must agree with all in one
WINDOW = 100  # for layers with a sliding window or chunks, so that keys before them are left out
BLOCK = 16
ROW_MULTIPLES = (4, 8, 16)  # that are tried
KEY_COUNTS = tuple(range(KEY_MULTIPLE, KEY_BLOCK + 1, KEY_MULTIPLE))


def linear_products(model: nn.Module) -> list[torch.Tensor]:
    """Returns what one packed layer of each shape makes of rows of random numbers."""
    with torch.inference_mode():
        return [layer.forward(_rows(layer)) for layer in _one_of_each(model)]


def linears_keep_bits(model: nn.Module, expected: Sequence[torch.Tensor] | None = None) -> bool:
    """Tries one packed layer of each shape. `expected`: linear_products at another time; None = now."""
    wholes = linear_products(model) if expected is None else expected
    with torch.inference_mode():
        for layer, whole in zip(_one_of_each(model), wholes, strict=True):
            x = _rows(layer)
            if any(not torch.equal(layer.forward(x[:rows]), whole[:rows]) for rows in ROWS):
                return False
    return True


def _one_of_each(model: nn.Module) -> list[PackedLinear]:
    layers = (layer for layer in model.modules() if isinstance(layer, PackedLinear))
    return list({(layer.in_features, layer.out_features): layer for layer in layers}.values())


def _rows(layer: PackedLinear) -> torch.Tensor:
    """Returns [max(ROWS), in] numbers, the same at each call."""
    x = torch.randn(max(ROWS), layer.in_features, generator=torch.Generator().manual_seed(1))
    return x.to(layer.dtype)


def row_batching(layers: Iterable[LayerAttention]) -> RowBatching | None:
    """Returns how rows that share keys can attend in one call without changing each other's bits; None where
    they cannot.

    The products of torch's kernel take a row or a few by ways of their own, which sum in another order, and
    cut the keys of a block in two where these are some more than their own blocks hold."""
    ways = _ways(layers)
    for rows in ROW_MULTIPLES if all(how.fused for how in ways) else ():
        free, whole = RowBatching(rows, KEY_COUNTS), RowBatching(rows, KEY_COUNTS[-1:])
        keys = tuple(
            count for count in KEY_COUNTS if all(_agree(how, [count], free, [count], whole) for how in ways)
        )
        found = RowBatching(rows, keys)
        if 2 * len(keys) > len(KEY_COUNTS) and attention_keeps_bits(ways, found):
            return found
    return None


def attention_keeps_bits(layers: Iterable[LayerAttention], batching: RowBatching | None) -> bool:
    """Tries each way to attend, with more keys than the model's own check has."""
    return all(_agree(how, CHUNKS, batching, [sum(CHUNKS)], batching) for how in _ways(layers))


def _ways(layers: Iterable[LayerAttention]) -> set[LayerAttention]:
    return {replace(how, window=_shortened(how.window), chunk=_shortened(how.chunk)) for how in layers}


def _shortened(reach: int | None) -> int | None:
    return reach and min(reach, WINDOW)


def _agree(
    how: LayerAttention,
    chunks: Sequence[int],
    batching: RowBatching | None,
    other_chunks: Sequence[int],
    other: RowBatching | None,
) -> bool:
    """Returns whether the same tokens, read in these chunks and in those, get the same bits."""
    # First blocks that follow one another, whose keys are read where they lie, then some that do not.
    scattered = [*range(10), *reversed(range(10, -(-sum(chunks) // BLOCK)))]
    with torch.inference_mode():
        found = _attended(how, chunks, scattered, batching)
        return torch.equal(found, _attended(how, other_chunks, sorted(scattered), other))


def _attended(
    how: LayerAttention, chunks: Sequence[int], blocks: Sequence[int], batching: RowBatching | None
) -> torch.Tensor:
    total = sum(chunks)
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(how.query_heads, total, how.width, generator=generator)
    key = torch.randn(how.key_heads, total, how.width, generator=generator)
    value = torch.randn(how.key_heads, total, how.value_width, generator=generator)
    sinks = torch.randn(how.query_heads, generator=generator) if how.sinks else None
    pools = KvPools(len(blocks), BLOCK)
    found, start = [], 0
    for chunk in chunks:
        inputs = build_step(
            [Work(blocks, start, [0] * chunk, 0)],
            block_size=BLOCK,
            scratch_block=pools.scratch_block,
            device=torch.device("cpu"),
            mask_dtype=torch.float32,
            views=[how.view],
            row_batching=batching,
        )
        run = slice(start, start + chunk)
        found.append(attend(pools, 0, query[:, run], key[:, run], value[:, run], inputs, how, sinks))
        start += chunk
    return torch.cat(found)
