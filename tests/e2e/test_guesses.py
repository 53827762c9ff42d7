"""The benchmark of guesses on a running service: `benchmarks/guesses.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from benchmarks.guesses import WORKLOADS, main
from tests.e2e.conftest import Serve

pytestmark = pytest.mark.process


def test_structured_output_is_measured_with_drafts_and_without(serve: Serve, tmp_path: Path) -> None:
    kept = tmp_path / "guesses.json"
    main(serve.url, max_tokens=8, repetitions=1, workloads=",".join(WORKLOADS[1:]), write=kept)
    rows = json.loads(kept.read_text())["rows"]
    assert rows.keys() == {f"{name}, {way}" for name in WORKLOADS[1:] for way in ("drafts", "no drafts")}
    assert all(rows[f"{name}, no drafts"]["tokens_a_step"] == [1.0] for name in WORKLOADS[1:])
    assert rows[f"{WORKLOADS[1]}, drafts"]["tokens_a_step"][0] >= 1.0


def test_a_workload_that_there_is_not_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="must be of copy-edit, json of choices"):
        main("http://127.0.0.1:1", workloads="poems")
