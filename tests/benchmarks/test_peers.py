"""The comparison with transformers and llama.cpp runs. The rates are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.peers import Files, main, ways
from tests.tiny_models import build


def test_they_are_asked_in_turn(tmp_path: Path) -> None:
    model, kept = str(build("llama", tmp_path / "model")), tmp_path / "result.json"
    names = ("outrider, plain, 1 thread", "transformers, plain, 1 thread")
    main(
        model,
        model,
        only="|".join(f"^{name}$" for name in names),
        count=1,
        max_tokens=24,
        rounds=1,
        write=kept,
    )
    result = json.loads(kept.read_text())["tokens_per_second"]
    assert result.keys() == set(names)
    for by_temperature in result.values():
        assert by_temperature.keys() == {"0", "0.8"}
        for rate in by_temperature.values():
            assert 0 < rate["least"] <= rate["median"] <= rate["most"]


@pytest.mark.parametrize(
    ("files", "llamas"),
    [
        (Files("T", "D"), set()),
        (Files("T", "D", Path("S"), Path("G")), {"llama.cpp, plain, 1 thread", "llama.cpp, plain"}),
        (
            Files("T", "D", Path("S"), gguf_8_bits=Path("G"), draft_gguf_8_bits=Path("H")),
            {"llama.cpp, 8 bits, plain, 1 thread", "llama.cpp, 8 bits, plain"}
            | {f"llama.cpp, 8 bits, {k} at a time" for k in (5, 8, 16)},
        ),
    ],
)
def test_llama_cpp_serves_what_there_are_files_of(files: Files, llamas: set[str]) -> None:
    assert {name for name in ways(files) if name.startswith("llama")} == llamas
