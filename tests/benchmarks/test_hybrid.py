"""The benchmark of a hybrid's step runs, and tells what drafts cost. The times are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.hybrid import KINDS, STEPS, main
from tests.benchmarks.whole import whole


@whole
def test_small_ones_are_measured(tmp_path: Path) -> None:
    main(rounds=2, hidden=256, write=tmp_path / "result.json")
    models = json.loads((tmp_path / "result.json").read_text())["models"]
    assert models.keys() == KINDS.keys()
    for found in models.values():
        assert found["bit_exact"] and len(found["of_one_row"]) == len(STEPS)
        assert found["of_one_row"]["0 drafts, 0 accepted"] == 1
        assert min(found["milliseconds"].values()) > 0
