"""The target's own text, many sessions at once, drawn as the service draws it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distillation.prompts import Prompt
from distillation.texts import Text
from outrider.engine.engine import Engine, Work
from outrider.engine.kv_blocks import BlockTable
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row, draw

CHUNK = 256  # tokens of a prompt in one step


def write(
    engine: Engine, prompts: Sequence[Prompt], temperatures: Sequence[float], new: int, seed: int
) -> list[Text]:
    """Returns each prompt with up to `new` tokens after it, at its own temperature; what ends a text is part
    of it. A prompt that leaves no room in the target's context is cut at its beginning."""
    room = max(1, most_tokens(engine) - new)
    prompts = [Prompt(prompt.ids[-room:], prompt.category) for prompt in prompts]
    params = [
        SamplingParams(temperature=temperature, seed=seed + at) for at, temperature in enumerate(temperatures)
    ]
    written = [list(prompt.ids) for prompt in prompts]
    tables = [BlockTable() for _ in prompts]
    going = list(range(len(prompts)))
    try:
        while going:
            works = [_work(engine, tables[at], written[at]) for at in going]
            logits = engine.step(works)
            drawing = [at for at, work in zip(going, works, strict=True) if work.rows]
            rows = [Row(params[at], len(written[at]), None, ()) for at in drawing]
            for at, token in zip(drawing, draw(logits, rows).tolist() if rows else [], strict=True):
                written[at].append(token)
                if token in engine.info.eos_token_ids or len(written[at]) == len(prompts[at].ids) + new:
                    engine.pool.close(tables[at])
                    going.remove(at)
    finally:
        for table in tables:
            engine.pool.close(table)
    return [
        Text(ids, len(prompt.ids), each.temperature, each.seed, prompt.category)
        for ids, prompt, each in zip(written, prompts, params, strict=True)
    ]


def read(engine: Engine, ids: Sequence[int]) -> torch.Tensor:
    """Returns the logits [n, V] after each token of a text."""
    table = BlockTable()
    found = []
    try:
        for first in range(0, len(ids), CHUNK):
            tokens = ids[first : first + CHUNK]
            engine.pool.extend(table, len(tokens))
            found.append(engine.step([Work(table.blocks, first, tokens, len(tokens))]).clone())
    finally:
        engine.pool.close(table)
    return torch.cat(found)


def most_tokens(engine: Engine) -> int:
    """Returns the most tokens of a text."""
    return min(engine.info.max_context, engine.pool.num_blocks * engine.pool.block_size)


def at_once(engine: Engine, most: int, length: int) -> int:
    """Returns how many sessions of a length fit into the engine, `most` at most."""
    blocks = -(-min(length, most_tokens(engine)) // engine.pool.block_size)
    return max(1, min(most, engine.pool.num_blocks // blocks))


def _work(engine: Engine, table: BlockTable, ids: Sequence[int]) -> Work:
    start = table.length
    tokens = ids[start : start + CHUNK]
    engine.pool.extend(table, len(tokens))
    return Work(table.blocks, start, tokens, int(table.length == len(ids)))
