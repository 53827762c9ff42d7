"""The comparison with transformers and llama.cpp runs. The rates are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.peers import Files, long_prompts, main, ways
from tests.benchmarks.whole import whole
from tests.tiny_models import build


@whole
def test_they_are_asked_in_turn(tmp_path: Path) -> None:
    model, kept = str(build("llama", tmp_path / "model")), tmp_path / "result.json"
    names = ("outrider, plain, 1 thread", "transformers, plain, 1 thread")
    main(
        model,
        model,
        only="|".join(f"^{name}$" for name in names),
        count=1,
        max_tokens=24,
        prompt_words=40,
        rounds=1,
        write=kept,
    )
    told = json.loads(kept.read_text())
    assert told["first_token_seconds"].keys() == set(names)
    result = told["tokens_per_second"]
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


def test_without_a_draft_guesses_are_looked_up_and_transformers_runs_plain() -> None:
    assert {name for name in ways(Files("T", "")) if name.startswith("transformers")} == {
        "transformers, plain, 1 thread",
        "transformers, plain",
    }


def test_long_prompts_share_no_beginning() -> None:
    first, again = long_prompts(50, 4, 0), long_prompts(50, 4, 1)
    assert {len(prompt.split()) for prompt in first} == {50}
    assert len({prompt[:40] for prompt in [*first, *again]}) == 8
    assert long_prompts(50, 4, 0) == first
    assert not long_prompts(0, 4, 0)
