"""A verifier from its start on: which threads its arithmetic runs on, and when its memory is taken."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.engine import Engine
from outrider.store.memory import MemoryStore
from tests.tiny_models import build
from verifier.config import VerifierConfig
from verifier.service import start

KV_BYTES = 2**28


def resident() -> int:
    """Bytes of this process that are in memory."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line]
    return int(line.split()[1]) * 1024


async def test_its_arithmetic_runs_on_one_thread_and_its_pool_is_taken_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading takes a thread that ends with it."""
    ran_on: list[str] = []
    forward = Engine._model_logits

    def noted(engine: Engine, inputs: Any) -> torch.Tensor:
        ran_on.append(threading.current_thread().name.partition("_")[0])
        return forward(engine, inputs)

    monkeypatch.setattr(Engine, "_model_logits", noted)
    target = str(build("llama", tmp_path / "target"))
    gc.collect()  # what other tests have left is not to be given back meanwhile
    before = resident()
    worker = await start(
        VerifierConfig(target=target, kv_memory_bytes=KV_BYTES, threads=1, cache=tmp_path / "cache"),
        MemoryStore(),
    )
    assert resident() - before > 0.9 * KV_BYTES
    loading = ran_on.count("loading")
    assert 0 < loading < len(ran_on)  # the checks of the engine, then the profile
    await worker.start()
    try:
        await asyncio.gather(worker.check(60.0), worker.check(60.0))
    finally:
        await worker.stop()
    assert ran_on == ["loading"] * loading + ["engine"] * (len(ran_on) - loading)
    assert not [each for each in threading.enumerate() if each.name.startswith("loading")]
