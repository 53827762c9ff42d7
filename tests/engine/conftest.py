from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine import native
from outrider.engine.engine import Engine
from outrider.engine.loading import load_engine
from tests.tiny_models import build


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a tiny model, made once."""
    made: dict[str, Path] = {}

    def get(arch: str, **overrides: Any) -> Path:
        key = f"{arch}-{overrides}"
        if key not in made:
            made[key] = build(arch, tmp_path_factory.mktemp(arch), **overrides)
        return made[key]

    return get


@pytest.fixture
def engine(checkpoint: Callable[..., Path]) -> Callable[..., Engine]:
    """A fresh engine on a tiny model."""

    def load(arch: str, **overrides: Any) -> Engine:
        return load_engine(str(checkpoint(arch, **overrides)), kv_memory_bytes=2**24)

    return load


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of our own is compiled: torch does the work."""
    monkeypatch.setattr(native, "COMPILERS", ("compiler",))
    native.library.cache_clear()
    yield
    native.library.cache_clear()
