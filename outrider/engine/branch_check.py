"""Shows at load that a token on a branch gets what it would get in a text."""

from __future__ import annotations

import logging

import torch

from outrider.engine.engine import Engine
from outrider.engine.kv_blocks import BlockTable
from outrider.engine.self_check import COARSE, LENGTH, check_tokens
from outrider.engine.step_inputs import Work

log = logging.getLogger(__name__)

BEFORE = 60  # tokens in the cache, one less than before the tree; so that a branch goes on in a second block
LINE = 3  # tokens that are not the text's, beside which it goes on
TAKEN = 6  # tokens of the branch that the second step finds in their places


def branches_agree(engine: Engine) -> bool:
    """Returns whether a text that goes on along a branch gets the logits that it gets in one piece, there and
    once it is in its place; to the bit where the engine keeps them. Logs it if not."""
    tokens, pool, lay_out = check_tokens(engine.info), engine.pool, engine.attention.lay_out
    assert lay_out is not None
    own = LENGTH - BEFORE
    parents = [*range(-1, LINE - 1), -1, *range(LINE, LINE + own - 1), LINE + 1]
    table, whole = BlockTable(), BlockTable()
    try:
        pool.extend(whole, LENGTH)
        expected = engine.step([Work(whole.blocks, 0, tokens, LENGTH)]).clone()
        found = lay_out(BEFORE - 1, BEFORE, parents)
        places = [place for place in found if place is not None]
        pool.close(whole)
        if len(places) < len(parents) or max(places) // pool.block_size >= pool.available:
            log.warning("a step verifies one path of a session's drafts: there is no room for branches")
            return False
        pool.extend(table, max(places) + 1)
        engine.step([Work(table.blocks, 0, tokens[: BEFORE - 1], 1)])
        others = [(token + 1) % engine.info.vocab_size for token in tokens[BEFORE : BEFORE + LINE]]
        run = [tokens[BEFORE - 1], *others, *tokens[BEFORE:], others[0]]
        rows = engine.step([Work(table.blocks, BEFORE - 1, run, len(run), parents, places)]).clone()
        alike = _alike(rows[:1], expected[BEFORE - 1 : BEFORE], engine)
        alike = alike and _alike(rows[1 + LINE : -1], expected[BEFORE:], engine)
        size = pool.block_size

        def slot(place: int) -> int:
            return table.blocks[place // size] * size + place % size

        moves = [(slot(places[LINE + taken]), slot(BEFORE + taken)) for taken in range(TAKEN)]
        first = BEFORE + TAKEN
        rows = engine.step([Work(table.blocks, first, tokens[first:], LENGTH - first, moves=moves)])
        alike = alike and _alike(rows, expected[first:], engine)
    finally:
        for each in (table, whole):
            pool.close(each)
    if not alike:
        log.warning("a step verifies one path of a session's drafts: branches get other logits here")
    return alike


def _alike(found: torch.Tensor, expected: torch.Tensor, engine: Engine) -> bool:
    if engine.info.bit_exact:
        return torch.equal(found, expected)
    return bool(((found - expected).norm(dim=1) <= COARSE * expected.norm(dim=1)).all())
