"""Drafts that are trees where a kernel reads pages: each branch is a sequence of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.engine import reference_attention
from outrider.engine.branching import depths, line_of, lineage
from outrider.engine.engine import Engine
from outrider.engine.kv_pools import PagedPools
from outrider.engine.loading import load_engine
from outrider.engine.paged_attention import PagedAttention
from outrider.engine.paged_trees import AGAIN, lay_out_on_pages, split
from outrider.engine.parts import Parts
from outrider.engine.reference_attention import KERNEL as REFERENCE
from outrider.engine.reference_attention import store
from outrider.engine.replayed import Replayed
from outrider.engine.step_inputs import Work
from tests.engine.test_gpu_path import paged, recorded

VOCAB = 199
SIZE = REFERENCE.block_size
#   a b c is the line; d follows b, with e behind it; f stands beside d; g and h beside a
PARENTS = (-1, 0, 1, 1, 3, 1, -1, -1)


def test_a_branch_stands_in_blocks_of_its_own_at_its_place_there() -> None:
    assert lay_out_on_pages(SIZE, 20, 21, (-1, 0, 1)) == [21, 22, 23]
    assert lay_out_on_pages(SIZE, 20, 21, PARENTS) == [21, 22, 23, 39, 40, 55, 69, 85]
    assert lay_out_on_pages(SIZE, 29, 30, PARENTS) == [30, 31, 32, 48, 49, 64, 94, 110]
    assert lay_out_on_pages(SIZE, 29, 30, (-1, -1, 1, 2)) == [30, 46, 47, 48]


def test_a_branch_that_would_store_too_much_again_has_no_place() -> None:
    read = 12  # tokens of the step's own that stand before a branch in its block
    assert lay_out_on_pages(SIZE, 0, read, (-1, -1)) == [12, None]
    assert lay_out_on_pages(SIZE, 0, read, (-1, -1, 1)) == [12, 28, 29], "two tokens may"
    assert lay_out_on_pages(SIZE, 11, read, (-1, -1)) == [12, 28], "what is in the cache is copied before"
    line = [*range(-1, 9)]
    assert lay_out_on_pages(32, 0, 1, [*line, 8, 9, 11]) == [*range(1, 11), None, 43, 44]


def tree(rng: random.Random, nodes: int) -> list[int]:
    return [rng.randrange(-1, node) for node in range(nodes)]


@given(st.integers(0, 10**6), st.integers(1, 24), st.integers(0, 100), st.integers(1, 40))
def test_each_token_sees_its_branch_and_each_slot_has_one_content(
    seed: int, nodes: int, start: int, text: int
) -> None:
    """Follows what the works of a step store and copy, and what each one's sequence reads then."""
    rng = random.Random(seed)
    parents = tree(rng, nodes)
    places = lay_out_on_pages(SIZE, start, start + text, parents)
    kept = [node for node, place in enumerate(places) if place is not None]
    number = {node: index for index, node in enumerate(kept)} | {-1: -1}
    parents = [number[parents[node]] for node in kept]
    stand = [place for place in lay_out_on_pages(SIZE, start, start + text, parents) if place is not None]
    assert len(stand) == len(parents), "those that are left have their places"
    blocks = list(range(100))
    rng.shuffle(blocks)
    tokens = [("text", start + index) for index in range(text)] + [
        ("node", node) for node in range(len(parents))
    ]
    work = Work(blocks, start, tokens, len(tokens), parents, stand)  # type: ignore[arg-type]
    other = Work([200], 3, [("other", 3)], 1)  # type: ignore[list-item]
    found = split([other, work], SIZE)
    assert [token for each in found.works for token in each.tokens] == [("other", 3), *tokens]
    assert sum(each.rows for each in found.works) == len(tokens) + 1
    assert len(found.again) <= AGAIN * len(tokens)

    def slot(table: Sequence[int], position: int) -> int:
        return table[position // SIZE] * SIZE + position % SIZE

    cache: dict[int, object] = {slot(blocks, position): ("text", position) for position in range(start)}
    for source, target in found.copies:
        assert target not in cache, "no slot of the text is written"
        cache[target] = cache[source]
    every = [("other", 3), *tokens]
    stored = [
        (slot(each.blocks, each.start + index), token)
        for each in found.works
        for index, token in enumerate(each.tokens)
    ] + [(place, every[token]) for token, place in found.again]
    assert len({place for place, _ in stored}) == len(stored)
    assert not {place for place, _ in stored} & set(cache)
    cache |= dict(stored)
    for each in found.works[1:]:
        for index, token in enumerate(each.tokens):
            seen = [cache[slot(each.blocks, position)] for position in range(each.start + index + 1)]
            kind, which = token  # type: ignore[misc]
            before = [] if kind == "text" else [("node", node) for node in reversed(lineage(parents, which))]
            last = which if kind == "text" else start + text - 1
            assert seen == [*(("text", position) for position in range(last + 1)), *before]
    for node, place in enumerate(stand):
        assert place % SIZE == (start + text + depths(parents)[node]) % SIZE
        assert node >= line_of(parents) or place == start + text + node


@pytest.mark.parametrize("make", [paged, recorded])
@pytest.mark.parametrize("arch", ["llama", "mistral"])
def test_a_row_of_a_tree_has_the_logits_of_its_path_and_moves_to_its_place(
    make: Callable[[Engine], Engine], arch: str, engine: Callable[..., Engine]
) -> None:
    running, rng = make(engine(arch)), random.Random(4)
    pool, lay_out = running.pool, running.attention.lay_out
    assert lay_out is not None

    def path_to(node: int) -> list[int]:
        return [tokens[each] for each in reversed(lineage(parents, node))]

    def alone(text: Sequence[int]) -> object:
        table = pool.open([1])
        pool.extend(table, len(text))
        found = running.step([Work(table.blocks, 0, text, 1)])[0].clone()
        pool.close(table)
        return found

    for length in (1, 14, 16, 17, 40, 150):
        prompt = [rng.randrange(VOCAB) for _ in range(length)]
        table, other = pool.open(prompt), pool.open([1])
        pool.extend(table, length)
        if length > 1:
            running.step([Work(table.blocks, 0, prompt[:-1], 0)])
        parents = [-1, 0, 1, *(rng.randrange(-1, node) for node in range(3, 12)), 11, 12, 13, 14]
        places = lay_out(length - 1, length, parents)
        assert None not in places
        tokens = [rng.randrange(VOCAB) for _ in places]
        stand = [place for place in places if place is not None]
        pool.extend(table, max(stand) + 1 - length)
        pool.extend(other, 3)
        works = [
            Work(other.blocks, 0, [5, 6, 7], 1),
            Work(table.blocks, length - 1, [prompt[-1], *tokens], len(tokens) + 1, parents, stand),
        ]
        prepared = running.prepare(works)
        if isinstance(running.runner, Replayed):
            assert prepared.prepared.shape in running.runner.shapes
        found = running.forward(prepared)[1:].clone()
        for node in range(-1, len(tokens)):
            expected = alone([*prompt, *path_to(node)])
            assert (found[1 + node] - expected).abs().max() < 1e-4, f"{length} tokens before, node {node}"

        taken = lineage(parents, len(tokens) - 1)[::-1]

        def slot(place: int, blocks: Sequence[int] = table.blocks) -> int:
            return blocks[place // SIZE] * SIZE + place % SIZE

        moves = [
            (slot(stand[node]), slot(length + depth))
            for depth, node in enumerate(taken)
            if stand[node] != length + depth
        ]
        assert moves
        branch = [Work(other.blocks, 3, [8], 0, moves=moves), Work(table.blocks, length + len(taken), [9], 1)]
        pool.extend(other, 1)
        (row,) = running.step(branch)
        assert (row - alone([*prompt, *path_to(len(tokens) - 1), 9])).abs().max() < 1e-4
        for each in (table, other):
            pool.close(each)


def test_branches_are_tried_when_a_model_loads(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parts = Parts(("reference",))

    def takes_trees() -> bool:
        engine = load_engine(str(checkpoint("llama")), kv_memory_bytes=2**22, parts=parts)
        engine.pool.check_integrity([])
        return engine.attention.lay_out is not None

    assert takes_trees()

    def forgetful(*given: Any) -> None:
        store(*given[:-1], replace(given[-1], again_ends=torch.zeros_like(given[-1].again_ends)))

    monkeypatch.setattr(reference_attention, "KERNEL", replace(REFERENCE, store=forgetful))
    assert not takes_trees() and "other logits" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(PagedPools, "copy_everywhere", lambda *_: None)
    assert not takes_trees()


def test_a_kernel_that_stores_at_one_place_takes_no_trees(engine: Callable[..., Engine]) -> None:
    bare = replace(REFERENCE, store=None)
    attention = PagedAttention.on(engine("llama").model, 8, bare)
    assert attention.lay_out is None
    with pytest.raises(ValueError, match="takes no branches"):
        attention.prepare([Work([0, 1], 0, [1, 2, 3], 3, (-1, -1), (1, 17))])
