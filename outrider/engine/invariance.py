"""Whether this machine's kernels give a row the same bits whatever runs beside it. Measured, on random
numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

import torch
from torch import nn

from outrider.engine.attention import LayerAttention
from outrider.engine.branching import KEY_BLOCK, PANELS, lay_out
from outrider.engine.kv_pools import KvPools
from outrider.engine.packed import PackedLinear
from outrider.engine.sdpa import attend
from outrider.engine.step_inputs import KEY_MULTIPLE, RowBatching, Work, build_step

ROWS = (1, 2, 5, 17, 64, 130, 300)  # row counts of linear layers that must agree
CHUNKS = (60, 1, 9, 60, 1, 200, 180, 1, 1, 17, 230, 1, 5, 250, 2)  # in steps that must agree with all in one
WINDOW = 100  # for layers with a sliding window or chunks, so that keys before them are left out
BLOCK = 16
BEFORE_BRANCHES = (0, 5, 60, 118, 170, 188, 240, 300, 370, 440, 490, 530)  # tokens, in a trial of trees
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
    return list({(layer.in_features, layer.out_features, layer.dtype): layer for layer in layers}.values())


def _rows(layer: PackedLinear) -> torch.Tensor:
    """Returns [max(ROWS), in] numbers, the same at each call."""
    x = torch.randn(max(ROWS), layer.in_features, generator=torch.Generator().manual_seed(1))
    return x.to(layer.packed.device, layer.dtype)


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


def panel(layers: Iterable[LayerAttention], batching: RowBatching | None) -> int:
    """Returns how many keys are a panel (see branching.py); 0 = tokens on branches do not keep their bits."""
    ways = _ways(layers)
    ways |= {replace(how, window=None, chunk=None) for how in ways}
    return next((size for size in PANELS if all(_keeps_panels(how, batching, size) for how in ways)), 0)


@lru_cache(maxsize=256)
def _keeps_panels(how: LayerAttention, batching: RowBatching | None, size: int) -> bool:
    return all(_on_a_branch(how, before, batching, size) for before in BEFORE_BRANCHES)


def _on_a_branch(how: LayerAttention, before: int, batching: RowBatching | None, size: int) -> bool:
    """Returns whether tokens behind so many get the same bits on a branch, beside a line of others."""
    line, own = 3, 12
    tree = [*range(-1, line - 1), -1, *range(line, line + own - 1)]
    places = [place for place in lay_out(size, before, before, tree) if place is not None]
    own = len(places) - line
    if own <= 0:
        return True
    rows = [*range(before), *range(line), *range(before, before + own)]
    blocks = range(-(-(max(places) + 1) // BLOCK))
    plain, branched = (
        Work(blocks, before, [0] * own, 0),
        Work(blocks, before, [0] * len(places), 0, tree[: len(places)], places),
    )
    with torch.inference_mode():
        expected = _attended_by(how, [plain], [*rows[:before], *rows[-own:]], blocks, batching)
        found = _attended_by(how, [branched], rows, blocks, batching)
    return torch.equal(found[-own:], expected[-own:])


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
    ends = list(accumulate(chunks))
    works = [Work(blocks, end - chunk, [0] * chunk, 0) for chunk, end in zip(chunks, ends, strict=True)]
    return _attended_by(how, works, range(sum(chunks)), blocks, batching)


def _attended_by(
    how: LayerAttention,
    works: Sequence[Work],
    rows: Sequence[int],
    blocks: Sequence[int],
    batching: RowBatching | None,
) -> torch.Tensor:
    """Runs the works one after the other, on random rows of these numbers. What is before the first one is in
    the cache."""
    total, order = max(rows) + 1, torch.tensor(list(rows))
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(how.query_heads, total, how.width, generator=generator)[:, order]
    key = torch.randn(how.key_heads, total, how.width, generator=generator)[:, order]
    value = torch.randn(how.key_heads, total, how.value_width, generator=generator)[:, order]
    sinks = torch.randn(how.query_heads, generator=generator) if how.sinks else None
    pools, start = KvPools(len(blocks), BLOCK), works[0].start
    slots = torch.tensor(list(blocks))[:, None] * BLOCK + torch.arange(BLOCK)
    pools.write(0, key[:, :start], value[:, :start], slots.flatten()[:start])
    found = []
    for work in works:
        inputs = build_step(
            [work],
            block_size=BLOCK,
            scratch_block=pools.scratch_block,
            device=torch.device("cpu"),
            mask_dtype=torch.float32,
            views=[how.view],
            row_batching=batching,
        )
        run = slice(start, start + len(work.tokens))
        found.append(attend(pools, 0, query[:, run], key[:, run], value[:, run], inputs, how, sinks))
        start = run.stop
    return torch.cat(found)
