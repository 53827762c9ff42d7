"""How a draft model is started."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from drafter.config import DrafterConfig
from drafter.draft_model import model_source
from outrider.engine.engine import Engine
from outrider.options.engine import EngineOptions
from tests.tiny_models import build


async def test_what_its_steps_compile_is_compiled_before_it_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed = list[tuple[str, int]]()

    def warm_up(engine: Engine, most_tokens: int, ranked: int = 0) -> None:
        warmed.append((threading.current_thread().name.partition("_")[0], ranked))

    monkeypatch.setattr("drafter.draft_model.warm_up", warm_up)
    folder = str(build("llama", tmp_path / "draft"))
    options = EngineOptions(kv_memory="4MiB", threads=1)
    await model_source(DrafterConfig(draft=folder, engine=options), None)
    assert [thread for thread, _ in warmed] == ["engine"] and warmed[0][1] > 1, "it ranks tokens"
