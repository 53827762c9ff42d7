"""Which models `outrider serve` serves, and how: the one that answers, the built-in pair, one's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from demo import pair, smollm2
from outrider.options.engine import EngineOptions
from outrider_cli.children import Models
from outrider_cli.serve import ServeOptions, _workers, choose_models


def package(folder: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package as the one that carries SmolLM2, which cannot be imported without what it needs."""
    weights = folder / smollm2.PACKAGE / file
    weights.parent.mkdir()
    weights.touch()
    (weights.parent / "__init__.py").write_text("import nothing_of_that_name")
    monkeypatch.syspath_prepend(str(folder))
    return weights


def test_without_a_name_the_model_that_answers_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = package(tmp_path, "Smol.gguf", monkeypatch)
    expected = Models(str(weights), None, smollm2.NAME, "suffix", chat=True)
    assert choose_models(None, None, 1) == expected
    assert choose_models(None, None, 0) == replace(expected, propose=None)
    assert choose_models(pair.NAME, None, 1).target == str(pair.TARGET)


@pytest.mark.parametrize("name", [None, pair.NAME])
def test_without_that_model_or_by_its_name_the_built_in_pair_is(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "nothing_of_that_name")
    assert choose_models(name, None, 1) == Models(str(pair.TARGET), str(pair.DRAFT), pair.NAME)
    assert choose_models(name, None, 0).draft is None
    assert choose_models(name, None, 1, "suffix") == Models(str(pair.TARGET), None, pair.NAME, "suffix")
    both = Models(str(pair.TARGET), str(pair.DRAFT), pair.NAME, "suffix")
    assert choose_models(pair.NAME, pair.NAME, 1, "suffix") == both
    assert choose_models(pair.NAME, pair.NAME, 1) == replace(both, propose=None)


@pytest.mark.parametrize(
    ("told", "quantization"),
    [
        ({}, "auto"),
        ({"quantization": "int8"}, "int8"),
        ({"dtype": "bfloat16"}, None),
        ({"device": "cuda"}, None),
        ({"tensor_parallel_size": 2}, None),
    ],
)
def test_the_first_model_runs_in_8_bits_unless_something_else_is_asked_for(
    told: dict[str, Any], quantization: str | None
) -> None:
    options = ServeOptions(engine=EngineOptions(**told), drafters=1)
    first = _workers(options, Models("m.gguf", None, "m", "suffix", chat=True))
    assert first.engine.quantization == quantization
    assert _workers(options, Models("m", None, "m")).engine.quantization == told.get("quantization")


def test_models_of_ones_own() -> None:
    assert choose_models("org/big-one", "folder/small/", 1) == Models(
        "org/big-one", "folder/small/", "big-one"
    )
    assert choose_models("a/b/", None, 0) == Models("a/b/", None, "b")
    assert choose_models("a/b", None, 1, "suffix") == Models("a/b", None, "b", "suffix")


def test_either_of_the_built_in_pair_goes_with_another_model() -> None:
    assert choose_models(pair.NAME, "folder/small", 1) == Models(str(pair.TARGET), "folder/small", pair.NAME)
    both = Models(str(pair.TARGET), "folder/small", pair.NAME, "suffix")
    assert choose_models(pair.NAME, "folder/small", 1, "suffix") == both
    assert choose_models("org/big-one", pair.NAME, 1) == Models("org/big-one", str(pair.DRAFT), "big-one")


def test_a_pair_that_is_not_there_is_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pair, "TARGET", tmp_path / "away")
    for draft in ("folder/small", pair.NAME):
        with pytest.raises(typer.Exit):
            choose_models(pair.NAME, draft, 1)
        assert "the built-in pair is missing" in capsys.readouterr().err
