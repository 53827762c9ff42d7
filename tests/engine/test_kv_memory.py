"""What of a device's memory an engine's keys and values get, and what workers leave to others on one GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from outrider.engine.engine import Engine
from outrider.engine.group import Alone
from outrider.engine.kv_memory import steps_bytes, with_all_blocks
from outrider.errors import StartupError
from outrider.options.engine import EngineOptions
from outrider.options.memory import Share
from outrider_cli.children import Workers, kv_memory

GPU = torch.device("cuda:0")
MIB = 2**20


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets what CUDA says that a GPU has free."""

    def has(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (count, 2**36))

    return has


def blocks(engine: Engine, asked: int | Share) -> int:
    group = Alone(engine.info.vocab_size)
    return with_all_blocks(engine.attention, engine.info, asked, GPU, group).pools.num_blocks


def test_a_share_is_of_what_is_free_less_what_steps_take(
    engine: Callable[..., Engine], free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.engine.kv_memory.LIBRARIES_BYTES", MIB)
    monkeypatch.setattr("outrider.engine.kv_memory.ROW_BYTES", 4)
    running = engine("llama")
    free(10 * MIB + steps_bytes(running.info, GPU))
    assert blocks(running, Share(60)) == blocks(running, 6 * MIB)
    assert blocks(running, Share(30)) == blocks(running, 3 * MIB)
    free(MIB)  # steps may find less than they would take
    assert blocks(running, Share(40)) == blocks(running, MIB // 10)


def test_what_is_not_there_is_refused_in_one_line(
    engine: Callable[..., Engine], free: Callable[[int], None]
) -> None:
    free(0)
    with pytest.raises(StartupError, match="--kv-memory of 90% of what is free, 0B, holds 0 blocks"):
        blocks(engine("llama"), Share(90))


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_what_a_worker_gets_that_is_told_nothing(device: str) -> None:
    assert EngineOptions(device=device).memory_for_kv == (2**30 if device == "cpu" else Share(90))


@pytest.mark.parametrize(
    ("told", "device", "verifiers", "drafters", "expected"),
    [
        (None, "cpu", 1, 1, (None, None)),
        ("2GiB", "cuda", 1, 1, ("2GiB", "2GiB")),
        (None, "cuda", 1, 1, ("70%", "50%")),
        (None, "cuda", 2, 2, ("35%", "25%")),
        ("60%", "cuda", 1, 1, ("60%", "50%")),
        ("60%", "cpu", 1, 1, ("60%", "50%")),
    ],
)
def test_workers_of_one_machine_divide_a_share(
    told: str | None, device: str, verifiers: int, drafters: int, expected: tuple[str | None, str | None]
) -> None:
    workers = Workers(verifiers, drafters, EngineOptions(device=device, kv_memory=told))
    assert kv_memory(workers, True) == expected


def test_a_target_alone_is_told_nothing() -> None:
    assert kv_memory(Workers(1, 0, EngineOptions(device="cuda")), False) == (None, None)
    assert kv_memory(Workers(3, 0, EngineOptions(device="cuda")), False)[0] == "30%"


@pytest.mark.parametrize("total", [24, 80, 141])
def test_target_and_draft_find_room_on_one_gpu(total: int) -> None:
    """Of 8 and of half a billion numbers in 16 bits, started one after the other, and again when one ends."""
    told = kv_memory(Workers(1, 1, EngineOptions(device="cuda")), True)
    weights = {"target": 16.0, "draft": 1.5}
    shares = dict(zip(weights, told, strict=True))
    taken = dict.fromkeys(weights, 0.0)
    for worker in ("target", "draft", "target", "draft"):
        taken[worker] = 0.0
        left = total - sum(taken.values()) - weights[worker]
        pool = left * float((shares[worker] or "").rstrip("%")) / 100
        taken[worker] = weights[worker] + pool
        assert pool > (4.0 if worker == "target" else 0.4)
