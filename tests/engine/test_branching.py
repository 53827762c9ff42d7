"""What follows what in a step whose drafts are trees."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import takewhile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.branching import KEY_BLOCK, TURN, depths, lay_out, lineage
from outrider.engine.engine import Engine
from outrider.engine.step_inputs import Work

VOCAB = 199


def test_a_token_stands_at_its_position_or_behind_where_its_turn_comes_as_it_would_there() -> None:
    assert lay_out(512, 7, 7, (-1, 0, 1)) == [7, 8, 9]
    #   a b c is the line; d follows b, with e behind it; f stands beside d; g and h beside a
    parents = (-1, 0, 1, 1, 3, 1, -1, -1)
    assert lay_out(512, 20, 20, parents) == [20, 21, 22, 38, 39, 54, 36, 52]
    assert lay_out(192, 509, 509, (-1, 0, 0)) == [509, 510, None], "it would be in another block"
    assert lay_out(192, 186, 186, (-1, -1, 1)) == [186, None, None]


@given(st.lists(st.integers(0, 30), max_size=24), st.integers(0, 2000))
def test_no_two_stand_at_one_place_and_each_stands_behind_those_that_it_sees(
    drawn: list[int], position: int
) -> None:
    parents = [number % (node + 1) - 1 for node, number in enumerate(drawn)]
    places = lay_out(192, position, position, parents)
    real = [place for place in places if place is not None]
    assert len(set(real)) == len(real)
    for node, place in enumerate(places):
        if place is not None:
            before = [places[each] for each in lineage(parents, node)]
            assert None not in before and before == sorted(before, reverse=True)
            at = position + depths(parents)[node]
            assert place >= at and place % TURN == at % TURN and place // KEY_BLOCK == at // KEY_BLOCK


@pytest.mark.parametrize("arch", ["llama", "mistral", "gemma2"])
def test_a_row_of_a_tree_gets_the_bits_of_its_path_alone(arch: str, engine: Callable[..., Engine]) -> None:
    """Beside others, around windows, and where a branch is the longer one."""
    running, rng = engine(arch), random.Random(4)
    pool = running.pool
    for length in (1, 14, 16, 40, 150, 530):
        prompt = [rng.randrange(VOCAB) for _ in range(length)]
        table, other = pool.open(prompt), pool.open([1])
        pool.extend(table, length)
        if length > 1:
            running.step([Work(table.blocks, 0, prompt[:-1], 0)])
        parents = [-1, 0, 1, *(rng.randrange(-1, node) for node in range(3, 12)), 11, 12, 13, 14]
        assert running.attention.lay_out is not None
        found = running.attention.lay_out(length - 1, length, parents)
        places = list(takewhile(lambda place: place is not None, found))
        assert len(places) > 4
        parents, tokens = parents[: len(places)], [rng.randrange(VOCAB) for _ in places]
        pool.extend(table, max(places) + 1 - length)
        pool.extend(other, 3)
        works = [
            Work(other.blocks, 0, [5, 6, 7], 1),
            Work(table.blocks, length - 1, [prompt[-1], *tokens], len(tokens) + 1, parents, places),
        ]
        given = running.step(works)[1:].clone()
        for node in range(-1, len(tokens)):
            path, at = list[int](), node
            while at >= 0:
                path.insert(0, tokens[at])
                at = parents[at]
            alone = pool.open([1])
            pool.extend(alone, length + len(path))
            (expected,) = running.step([Work(alone.blocks, 0, [*prompt, *path], 1)])
            assert torch.equal(given[1 + node], expected), f"{length} tokens before, node {node}"
            pool.close(alone)
        for each in (table, other):
            pool.close(each)
