"""A verifier from its start on: which threads its arithmetic runs on, and when its memory is taken."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.engine import Engine
from outrider.engine.runner import CallByCall
from outrider.errors import OutriderError
from outrider.options.engine import EngineOptions
from outrider.store.memory import MemoryStore
from outrider.worker import model
from outrider.worker.worker import ready_line
from tests.forked import said
from tests.tiny_models import build
from verifier.config import VerifierConfig
from verifier.service import start

KV_BYTES = 2**28


START = """
import asyncio, sys
from pathlib import Path
from outrider.options.engine import EngineOptions
from outrider.store.memory import MemoryStore
from verifier.config import VerifierConfig
from verifier.service import start

def resident():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line]
    return int(line.split()[1]) * 1024

async def main(target, kv_bytes, cache):
    before = resident()
    config = VerifierConfig(target, engine=EngineOptions(kv_memory=kv_bytes, threads=1), cache=Path(cache))
    worker = await start(config, MemoryStore())
    print(resident() - before)
    await worker.stop()

asyncio.run(main(*sys.argv[1:]))
"""


def test_its_pool_is_taken_at_once(tmp_path: Path) -> None:
    """The verifier starts in a process of its own: what another has given back, its pool may take without
    growing."""
    target = str(build("llama", tmp_path / "target"))
    told = said(("-c", START, target, str(KV_BYTES), str(tmp_path / "cache")))
    assert int(told.split()[-1]) > 0.9 * KV_BYTES


async def test_its_arithmetic_runs_on_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading takes a thread that ends with it."""
    ran_on: list[str] = []
    forward = CallByCall.run

    def noted(runner: CallByCall, inputs: Any) -> torch.Tensor:
        ran_on.append(threading.current_thread().name.partition("_")[0])
        return forward(runner, inputs)

    def warmed(engine: Engine, most_tokens: int) -> None:
        warmed_on.append(threading.current_thread().name.partition("_")[0])

    warmed_on: list[str] = []
    monkeypatch.setattr(CallByCall, "run", noted)
    monkeypatch.setattr("verifier.service.warm_up", warmed)
    target = str(build("llama", tmp_path / "target"))
    worker = await start(
        VerifierConfig(
            target, engine=EngineOptions(kv_memory=str(KV_BYTES), threads=1), cache=tmp_path / "cache"
        ),
        MemoryStore(),
    )
    loading = ran_on.count("loading")
    assert 0 < loading < len(ran_on)  # the checks of the engine, then the profile
    ready = ready_line(worker.info, worker.address, worker.note)
    assert re.search(
        r" (native|gathered) attention, packed products, layers in one pass, steps call by call\)$", ready
    )
    await worker.start()
    try:
        await asyncio.gather(worker.check(60.0), worker.check(60.0))
    finally:
        await worker.stop()
    assert ran_on == ["loading"] * loading + ["engine"] * (len(ran_on) - loading)
    assert warmed_on == ["engine"]
    assert not [each for each in threading.enumerate() if each.name.startswith("loading")]


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ({"max_model_len": 999_999}, "--max-model-len must be at most the model's 512, not 999999"),
        ({"engine": EngineOptions(tensor_parallel_size=64)}, "cannot be divided among 64 processes"),
    ],
)
async def test_what_its_model_cannot_be_is_said_before_anything_is_started_or_read(
    told: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minutes, where a model is large; and 63 processes had been started for a typing mistake."""
    target = str(build("llama", tmp_path / "target", max_position_embeddings=512))
    monkeypatch.setattr(model, "load_engine", lambda *_, **__: pytest.fail("it is loaded"))

    def start_followers(specs: object) -> Any:
        pytest.fail("others are started")

    with pytest.raises(OutriderError, match=re.escape(sentence)):
        await start(VerifierConfig(target, **told), MemoryStore(), start_followers)
