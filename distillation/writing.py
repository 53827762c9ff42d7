"""The target's own text, many sessions at once, drawn as the service draws it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from distillation.prompts import Prompt
from distillation.states import KeptStates
from distillation.texts import KEPT, NO_STATES, PLACE, Lesson, Likely, States, Text
from outrider.engine.engine import Engine, Work
from outrider.engine.kv_blocks import BlockTable
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row, draw

CHUNK = 256  # tokens of a text in one step
MOST_TOKENS = 512  # of a step: larger ones are not recorded on a GPU
GREEDY_TEMPERATURE = 0.5  # at which greedy text teaches


@dataclass(slots=True)
class _Writing:
    """A text that is being written."""

    ids: list[int]
    prompt: Prompt
    params: SamplingParams
    end: int  # its most tokens
    blocks: int  # that it may come to hold
    table: BlockTable = field(default_factory=BlockTable)
    likely: list[Likely] = field(default_factory=list)
    states: list[States] = field(default_factory=list)

    def lesson(self) -> Lesson:
        params, prompt = self.params, self.prompt
        text = Text(self.ids, len(prompt.ids), params.temperature, params.seed, prompt.category)
        states = np.concatenate(self.states) if self.states else NO_STATES
        return Lesson(text, np.concatenate(self.likely), states)


def write(
    engine: Engine,
    prompts: Sequence[Prompt],
    temperatures: Sequence[float],
    new: int,
    seed: int,
    sessions: int,
    states: KeptStates | None = None,
) -> Iterator[Lesson]:
    """Yields each prompt with up to `new` tokens after it, once they are written; what ends a text is part of
    it. Each has its own temperature, and seeds count from `seed`. Beside a text is what the target held
    likely at each place that it wrote, at the temperature at which the text teaches, and the `states` there,
    if they are to be kept.

    No text is longer than the target's context: a prompt that leaves no room there is cut at its beginning.
    At most `sessions` texts are written at a time, fewer if no more fit into the engine."""
    pool = engine.pool
    most = min(engine.info.max_context, pool.num_blocks * pool.block_size)
    new = min(new, most - 1)
    room = most - new
    waiting = list[_Writing]()
    for at, (prompt, temperature) in enumerate(zip(prompts, temperatures, strict=True)):
        ids = list(prompt.ids[-room:])
        blocks = -(-(len(ids) + new) // pool.block_size)
        params = SamplingParams(temperature=temperature, seed=seed + at)
        whole = Prompt(tuple(ids), prompt.category)
        waiting.append(_Writing(ids, whole, params, len(ids) + new, blocks))
    waiting.reverse()
    going = list[_Writing]()
    try:
        while waiting or going:
            while waiting and len(going) < sessions:
                if going and waiting[-1].blocks + sum(each.blocks for each in going) > pool.num_blocks:
                    break
                going.append(waiting.pop())
            for done in _step(engine, going, states):
                pool.close(done.table)
                going.remove(done)
                yield done.lesson()
    finally:
        for each in going:
            pool.close(each.table)


def _step(engine: Engine, going: Sequence[_Writing], states: KeptStates | None) -> list[_Writing]:
    """Runs a piece of each text, as far as a step has room, and returns those that are done."""
    room, works, drawing = MOST_TOKENS, list[Work](), list[_Writing]()
    for each in going:
        start = each.table.length
        if tokens := each.ids[start : start + min(CHUNK, room)]:
            engine.pool.extend(each.table, len(tokens))
            room -= len(tokens)
            last = each.table.length == len(each.ids)
            works.append(Work(each.table.blocks, start, tokens, int(last)))
            if last:
                drawing.append(each)
    logits = engine.step(works)
    if not drawing:
        return []
    places = _likely(logits, [each.params.temperature or GREEDY_TEMPERATURE for each in drawing])
    tokens = draw(logits, [Row(each.params, len(each.ids), None, ()) for each in drawing]).tolist()
    for each, token, place in zip(drawing, tokens, places, strict=True):
        each.ids.append(token)
        each.likely.append(place[None])
    if states is not None:
        for each, state in zip(drawing, states.rows(), strict=True):
            each.states.append(state[None])
    return [
        each for each in drawing if each.ids[-1] in engine.info.eos_token_ids or len(each.ids) == each.end
    ]


def _likely(logits: torch.Tensor, temperatures: Sequence[float]) -> Likely:
    """Returns the likeliest tokens of each row [n, V] at its temperature. Where there are fewer than are
    kept, token 0 stands in with no probability."""
    scaled = logits.float() / torch.tensor(temperatures, device=logits.device)[:, None]
    found = scaled.topk(min(KEPT, scaled.shape[1]), sorted=False)
    probabilities = (found.values - scaled.logsumexp(-1, keepdim=True)).exp()
    places = np.zeros(len(temperatures), PLACE)
    places["ids"][:, : found.indices.shape[1]] = found.indices.cpu()
    places["probabilities"][:, : found.indices.shape[1]] = probabilities.cpu()
    return places
