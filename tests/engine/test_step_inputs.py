"""What a step's index tensors let each token see: its session's tokens up to itself, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from outrider.engine import step_inputs
from outrider.engine.engine import Engine
from outrider.engine.step_inputs import (
    MOST_SHARING,
    RowBatching,
    StepInputs,
    View,
    Work,
    build_step,
    padded_keys,
)

BLOCK = 16
BLOCKS = 400
SHARING = 3  # query heads of a key head
ALL = View(None, SHARING)
VIEWS = [ALL, View(24, SHARING), View(600, SHARING), View(None, SHARING, 24), View(None, SHARING, 300)]
BATCHING = RowBatching(rows=4, keys=(64, 192, 512))


def build(works: list[Work], view: View, key_bytes: int, batching: RowBatching | None = None) -> StepInputs:
    return build_step(
        works,
        block_size=BLOCK,
        scratch_block=BLOCKS,
        device=torch.device("cpu"),
        mask_dtype=torch.float32,
        views=[view],
        key_bytes=key_bytes,
        row_batching=batching,
    )


def some_works(seed: int) -> list[Work]:
    rng = random.Random(seed)
    free = list(range(BLOCKS))
    if seed % 2:
        rng.shuffle(free)
    works = []
    for _ in range(rng.randint(1, 9)):
        start, count = rng.choice([0, 3, 60, 64, 250, 700]), rng.choice([1, 1, 2, 5, 9, 40, 70])
        blocks = [free.pop(0) for _ in range(-(-(start + count) // BLOCK))]
        works.append(Work(blocks, start, [rng.randrange(99) for _ in range(count)], rng.randint(0, count)))
    return works


def first_seen(view: View, position: int) -> int:
    if view.chunk:
        return position // view.chunk * view.chunk
    return max(0, position + 1 - (view.window or 10**9))


def slots_of(work: Work) -> list[int]:
    """Returns the slot of every position up to the work's end."""
    return [
        work.blocks[position // BLOCK] * BLOCK + position % BLOCK
        for position in range(work.start + len(work.tokens))
    ]


@pytest.mark.parametrize("key_bytes", [0, 2**14, 2**30])  # no tiles, some sessions each, one session each
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("batching", [None, BATCHING])
@pytest.mark.parametrize("seed", range(8))
def test_every_token_sees_its_session_up_to_itself(
    seed: int, batching: RowBatching | None, view: View, key_bytes: int
) -> None:
    works = some_works(seed)
    inputs = build(works, view, key_bytes, batching)
    expected = {
        slots_of(work)[position]: set(slots_of(work)[first_seen(view, position) : position + 1])
        for work in works
        for position in range(work.start, work.start + len(work.tokens))
    }
    seen: dict[int, set[int]] = {}
    for tile in inputs.tiles(view):
        blocks = torch.arange(BLOCKS + 1)[tile.blocks].view(tile.sessions, -1, 1)
        keys = (blocks * BLOCK + torch.arange(BLOCK)).view(tile.sessions, -1)  # [S, K] slots
        for tokens, sessions, mask in tile.calls:
            slots = inputs.slots[tokens].view(len(mask), -1)  # [n, t]: a token each, or all of a session
            rows = slots.repeat_interleave(SHARING if batching and slots.shape[1] < MOST_SHARING else 1, 1)
            assert mask.shape[2] == (-(-rows.shape[1] // 4) * 4 if batching else 1)
            for entry, (of_rows, masks) in enumerate(zip(rows, mask[:, 0], strict=True)):
                of_session = keys[sessions][entry if len(keys[sessions]) > 1 else 0]
                for slot, hidden in zip(of_rows.tolist(), masks, strict=False):  # but those that fill up
                    visible = set(of_session[hidden == 0].tolist())
                    assert seen.setdefault(slot, visible) == visible
    assert seen == expected


@pytest.mark.parametrize("seed", range(8))
def test_tokens_and_wanted_rows_keep_their_order(seed: int) -> None:
    works = some_works(seed)
    inputs = build(works, ALL, 2**14)
    by_slot = dict(zip(inputs.slots.tolist(), inputs.input_ids[0].tolist(), strict=True))
    wanted = []
    for work in works:
        own = slots_of(work)[work.start :]
        assert [by_slot[slot] for slot in own] == list(work.tokens)
        wanted += own[len(own) - work.rows :]
    assert inputs.rows == len(wanted)
    assert inputs.slots[inputs.keep].tolist()[: len(wanted)] == wanted


def test_a_tile_is_no_larger_than_the_caches() -> None:
    works = [Work(list(range(i * 6, i * 6 + 6)), 90, [1], 1) for i in range(32)]
    key_bytes = 2**13
    tiles = build(works, ALL, key_bytes).tiles(ALL)
    assert [tile.sessions for tile in tiles] == [4] * 8
    assert all(tile.sessions * padded_keys(91) * key_bytes <= step_inputs.TILE_BYTES for tile in tiles)


def test_as_many_keys_are_read_as_give_the_same_bits() -> None:
    lengths = (1, 64, 65, 193, 512, 513, 600, 1000, 1100)
    assert [padded_keys(length) for length in lengths] == [64, 64, 128, 256, 512, 576, 640, 1024, 1152]
    padded = [padded_keys(length, BATCHING) for length in lengths]
    assert padded == [64, 64, 192, 512, 512, 576, 704, 1024, 1216]


def test_sessions_with_equally_many_tokens_attend_in_one_call() -> None:
    works = [Work(list(range(i * 4, i * 4 + 4)), 50, [1] * count, 1) for i, count in enumerate([1, 5, 1, 5])]
    together, alone = (build(works, ALL, 0, batching).tiles(ALL) for batching in (BATCHING, None))
    assert [mask.shape[:3] for _, _, mask in together[0].calls] == [(2, 1, 16), (2, 1, 4)]
    assert [mask.shape[:3] for _, _, mask in alone[0].calls] == [(5, 1, 1), (5, 1, 1), (2, 1, 1)]


def test_the_masks_of_long_pieces_of_prompts_are_not_repeated_for_each_head() -> None:
    masks = [
        build([Work(list(range(20)), 100, [1] * count, 0)], ALL, 0, BATCHING).tiles(ALL)[0].calls[0][2]
        for count in (63, 64, 129)
    ]
    assert [mask.shape[2] for mask in masks] == [192, 64, 132]


def test_one_session_is_read_where_it_lies() -> None:
    in_a_row, scattered = Work([5, 6, 7], 40, [1, 2], 1), Work([5, 7, 6], 40, [1, 2], 1)
    at_the_end = Work([BLOCKS - 2, BLOCKS - 1], 20, [1], 1)  # 64 keys from there are more than there are
    assert [build([work], ALL, 0).tiles(ALL)[0].blocks for work in (in_a_row,)] == [slice(5, 9)]
    for work in (scattered, at_the_end):
        assert isinstance(build([work], ALL, 0).tiles(ALL)[0].blocks, torch.Tensor)


def test_where_blocks_lie_and_who_shares_a_tile_changes_no_bit(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [(11 * i) % 198 + 1 for i in range(150)]
    found = []
    for blocks, tile_bytes, company in (
        (list(range(10)), step_inputs.TILE_BYTES, 0),
        ([9, 3, 5, 1, 0, 2, 4, 8, 6, 7], step_inputs.TILE_BYTES, 5),
        ([0, 1, 2, 3, 4, 5, 6, 7, 9, 8], 1, 5),
    ):
        monkeypatch.setattr(step_inputs, "TILE_BYTES", tile_bytes)
        subject = engine("llama")
        works = [Work(list(range(10 * i, 10 * i + 10)), 0, prompt[::-1], 0) for i in range(1, company + 1)]
        subject.step([*works, Work(blocks, 0, prompt[:145], 1)])
        works = [Work(work.blocks, 150, [7], 1) for work in works]
        found.append(subject.step([*works, Work(blocks, 145, prompt[145:], 5)])[-5:])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
