"""The benchmark of company runs. The ratios are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.company import ODD, main
from tests.tiny_models import build


def test_every_parameter_is_measured(tmp_path: Path) -> None:
    model, kept = str(build("llama", tmp_path / "model")), tmp_path / "result.json"
    main(target=model, draft=model, vocabulary=5000, rounds=1, write=kept)
    ratios = json.loads(kept.read_text())["ratios"]
    assert len(ratios) == 12
    for ratio in ratios.values():
        assert ratio.keys() == {"milliseconds", *ODD} and ratio["the same"] == 1.0
