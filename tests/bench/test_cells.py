from __future__ import annotations

import random

from outrider_cli.bench.cells import (
    ASSISTED,
    LOCK_STEP,
    PLAIN,
    PLAIN_ALL,
    STREAMING,
    TRANSFORMERS,
    Cell,
    Setting,
    asked,
    cells,
    in_order,
    prompts_needed,
)

PLANNED = cells((PLAIN, STREAMING, TRANSFORMERS), ("code", "prose"), (0.0, 0.8), (1, 16), (0.0, 20.0))


def test_every_setting_is_measured_in_every_way_of_ours() -> None:
    ours = [cell for cell in PLANNED if cell.way != TRANSFORMERS]
    assert len(ours) == len(set(ours)) == 2 * 2 * 2 * 2 * 2
    assert Cell(STREAMING, Setting("prose", 0.8, 16, 20.0)) in ours


def test_transformers_takes_one_stream_and_has_no_line() -> None:
    peers = [cell.setting for cell in PLANNED if cell.way == TRANSFORMERS]
    assert sorted(peers) == [Setting(w, t, 1, 0.0) for w in ("code", "prose") for t in (0.0, 0.8)]
    assert cells((ASSISTED,), ("code",), (0.0,), (4, 16), (0.0,)) == []


def test_a_target_with_all_cores_has_no_line() -> None:
    found = cells((PLAIN_ALL,), ("code",), (0.0,), (1, 16), (0.0, 20.0))
    assert [cell.setting for cell in found] == [Setting("code", 0.0, n, 0.0) for n in (1, 16)]


def test_a_repetition_is_everything_once_in_an_order_that_the_seed_gives() -> None:
    once = in_order(PLANNED, random.Random(1))
    flat = [cell for _, part in once for cell in part]
    assert sorted(flat) == sorted(PLANNED)
    assert flat != sorted(PLANNED)
    assert once == in_order(PLANNED, random.Random(1))
    assert once != in_order(PLANNED, random.Random(2))
    assert all({cell.setting.rtt_ms for cell in part} == {rtt} for rtt, part in once)
    assert len(once) == 2


def test_groups_take_the_next_prompts_round_and_round() -> None:
    assert [asked(1, repetition, 4) for repetition in range(5)] == [[0], [1], [2], [3], [0]]
    assert asked(3, 1, 4) == [3, 0, 1]
    assert asked(4, 2, 4) == [0, 1, 2, 3]
    assert (prompts_needed((1, 16), 3), prompts_needed((1, 2), 5)) == (16, 5)


def test_cells_can_be_told() -> None:
    setting = Setting("code", 0.0, 1, 20.0)
    assert str(setting) == "code, temperature 0, 1 stream, 20 ms"
    assert Cell(LOCK_STEP, setting).as_json() == {
        "way": "lock-step",
        "workload": "code",
        "temperature": 0.0,
        "streams": 1,
        "rtt_ms": 20.0,
    }
