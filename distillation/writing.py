"""The target's own text, many sessions at once, drawn as the service draws it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from distillation.prompts import Prompt
from distillation.texts import Text
from outrider.engine.engine import Engine, Work
from outrider.engine.kv_blocks import BlockTable
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row, draw

CHUNK = 256  # tokens of a text in one step
MOST_TOKENS = 512  # of a step: larger ones are not recorded on a GPU


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
            works = dict(_works(engine, {at: written[at] for at in going}, tables, all_rows=False))
            logits = engine.step(list(works.values()))
            drawing = [at for at, work in works.items() if work.rows]
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


def read(
    engine: Engine, texts: Sequence[Sequence[int]], kept: Callable[[int, torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Returns of each text what is `kept` of the logits [n, V] after its tokens, some of them at a time, put
    together again. As many texts are read together as fit."""
    found = [list[torch.Tensor]() for _ in texts]
    most, first = at_once(engine, len(texts), max(map(len, texts))), 0
    while first < len(texts):
        group = {at: texts[at] for at in range(first, min(first + most, len(texts)))}
        tables, first = {at: BlockTable() for at in group}, first + most
        try:
            while works := dict(_works(engine, group, tables, all_rows=True)):
                logits = engine.step(list(works.values()))
                parts = torch.split(logits, [work.rows for work in works.values()])
                for at, part in zip(works, parts, strict=True):
                    found[at].append(kept(at, part))
        finally:
            for table in tables.values():
                engine.pool.close(table)
    return [torch.cat(parts) for parts in found]


def most_tokens(engine: Engine) -> int:
    """Returns the most tokens of a text."""
    return min(engine.info.max_context, engine.pool.num_blocks * engine.pool.block_size)


def at_once(engine: Engine, most: int, length: int) -> int:
    """Returns how many sessions of a length fit into the engine, `most` at most."""
    blocks = -(-min(length, most_tokens(engine)) // engine.pool.block_size)
    return max(1, min(most, engine.pool.num_blocks // blocks))


def _works(
    engine: Engine,
    texts: Mapping[int, Sequence[int]],
    tables: Mapping[int, BlockTable] | Sequence[BlockTable],
    all_rows: bool,
) -> Iterator[tuple[int, Work]]:
    """Yields what a step runs of the texts, by their numbers: of each that is not read to its end a piece, as
    far as a step has room. Logits are of all its tokens, or of the last of the text alone."""
    room = MOST_TOKENS
    for at, ids in texts.items():
        start = tables[at].length
        tokens = ids[start : start + min(CHUNK, room)]
        if tokens:
            engine.pool.extend(tables[at], len(tokens))
            rows = len(tokens) if all_rows else int(tables[at].length == len(ids))
            yield at, Work(tables[at].blocks, start, tokens, rows)
            room -= len(tokens)
