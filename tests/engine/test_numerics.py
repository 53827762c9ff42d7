"""The name of what an engine computes: the same for the same numbers, another for others."""

from __future__ import annotations

from pathlib import Path

from outrider.engine.loading import load_engine
from outrider.engine.numerics import numerics
from tests.tiny_models import build


def test_the_same_numbers_have_one_name_and_others_have_another(tmp_path: Path) -> None:
    model = str(build("llama", tmp_path / "model"))
    other = str(build("llama", tmp_path / "other", seed=1))

    def named(path: str = model, **how: str) -> str:
        engine = load_engine(path, threads=1, kv_memory_bytes=2**22, **how)  # type: ignore[arg-type]
        assert numerics(engine) == engine.info.numerics, "it changes with what ran before"
        engine.pool.check_integrity([])
        return engine.info.numerics

    plain = named()
    assert plain == named() and plain.startswith("float32-")
    names = [plain, named(dtype="bfloat16"), named(quantization="int8"), named(other)]
    assert len(set(names)) == 4
    assert [name.rpartition("-")[0] for name in names] == [
        *("float32", "bfloat16", "float32-int8", "float32")
    ]


def test_the_least_pool_is_enough(tmp_path: Path) -> None:
    engine = load_engine(str(build("llama", tmp_path / "model")), threads=1, kv_memory_bytes=2 * 16 * 768 * 2)
    assert engine.pool.num_blocks >= 2 and engine.info.numerics
