"""The benchmark's dry run on a CPU goes through all that it does on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import main
from benchmarks.gpu_report import goals


def test_the_dry_run_measures_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "result.json"
    main("cpu", drafts=3, write=kept)
    result = json.loads(kept.read_text())
    assert result["exactness"]["share_of_tokens_as_generate"] == 1.0
    assert result["exactness"]["texts_as_without_drafts"] == 1.0
    assert list(result["targets"]) == ["bfloat16", "draft", "torch"]
    assert {case["kernel"] for case in result["attention"]} == {"reference"}
    for target in result["targets"].values():
        assert list(target["curve"]) == ["1", "2", "4"]
        assert target["kernel"] == "reference"
        assert target["single_stream"]["bytes"] > 2 * 199 * 64
        for found in target["batches"].values():
            assert found["plain"]["tokens_per_step"] == 1.0
            assert 1.0 < found["drafts"]["tokens_per_step"] <= 4.0
    assert "share of copy bandwidth" in capsys.readouterr().out


def test_goals_are_judged() -> None:
    single = {"share_of_copy_bandwidth": 0.81, "host_gap": 0.06}
    targets = {"bfloat16": {"single_stream": single}}
    result = {"targets": targets, "exactness": {"share_of_tokens_as_generate": 0.99}}
    assert [met for _, _, _, met in goals(result)] == [True, False, True]


def test_without_a_gpu_it_ends_in_a_sentence() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit, match="there is no CUDA device here"):
        main()
