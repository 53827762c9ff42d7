"""Another number of threads for a while: only if it gives the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine import packed
from outrider.engine.engine import Engine, Work
from outrider.engine.kv_blocks import BlockTable
from outrider.engine.loading import load_engine
from tests.tiny_models import build


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(build("llama", tmp_path / "target"))


def logits(engine: Engine) -> torch.Tensor:
    table = BlockTable()
    engine.pool.extend(table, 40)
    found = engine.step([Work(table.blocks, 0, list(range(40)), 40)]).clone()
    engine.pool.close(table)
    return found


async def test_steps_have_other_threads_from_the_next_on(folder: str) -> None:
    engine = load_engine(folder, threads=1, resting_threads=2, kv_memory_bytes=2**24)
    assert (engine.threads, engine.resting_threads, torch.get_num_threads()) == (1, 2, 1)
    before = await engine.run(logits, engine)
    engine.use_threads(2)
    assert await engine.run(torch.get_num_threads) == 2
    assert torch.equal(await engine.run(logits, engine), before)
    engine.use_threads(1)
    assert await engine.run(torch.get_num_threads) == 1
    engine.close()


@pytest.mark.usefixtures("no_compiler")
def test_threads_that_give_other_bits_are_not_used(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    product = packed.product

    def rounding(*given: Any) -> torch.Tensor:
        found: torch.Tensor = product(*given)
        return found * (1 + 2**-20) if torch.get_num_threads() == 2 else found

    monkeypatch.setattr(packed, "product", rounding)
    engine = load_engine(folder, threads=1, resting_threads=2, kv_memory_bytes=2**24)
    assert engine.resting_threads == 1 and engine.info.bit_exact
    assert "has other bits with 2 threads than with 1" in caplog.text
