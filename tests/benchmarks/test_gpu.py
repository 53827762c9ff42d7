"""The benchmark's dry run on a CPU goes through all that it does on a GPU."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from benchmarks import soak
from benchmarks.gpu import main
from benchmarks.gpu_report import goals
from benchmarks.gpu_timing import Budget
from tests.benchmarks.whole import whole


@whole
def test_the_dry_run_measures_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "result.json"
    main("cpu", drafts=3, ways="", write=kept)
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


@whole
@pytest.mark.process
def test_the_dry_run_serves_and_watches_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(soak, "SAMPLE_SECONDS", 0.1)
    kept = tmp_path / "result.json"
    main("cpu", kinds="", ways="cpu-draft,drafts", churn_seconds=2, write=kept)
    served = json.loads(kept.read_text())["service"]["ways"]
    assert list(served) == ["plain", "cpu-draft", "drafts"]
    for name, found in served.items():
        assert [(cell["temperature"], cell["streams"]) for cell in found["cells"]] == [
            (0.0, 1),
            (0.0, 2),
            (0.8, 1),
            (0.8, 2),
        ]
        drafted = [cell for cell in found["cells"] if cell["acceptance"] is not None]
        assert bool(drafted) == (name != "plain")
        for cell in found["cells"]:
            assert cell["texts_as_plain"] == 1.0 and cell["tokens_per_second"] > 0
    churn = served["drafts"]["churn"]
    assert set(churn["processes"]) == {"router", "target", "draft"} and churn["clients_failed"] == []
    assert "streams that come and go" in capsys.readouterr().out


def test_what_is_not_known_is_refused_before_anything_runs() -> None:
    with pytest.raises(SystemExit, match="--ways trees is not one of drafts, paths, sources"):
        main("cpu", ways="trees")
    with pytest.raises(SystemExit, match="--churn-seconds must be at least 20, or 0 for none"):
        main("cpu", churn_seconds=5)
    with pytest.raises(SystemExit, match="--kinds int4 is not one of bfloat16, fp8"):
        main("cpu", kinds="int4")


def test_goals_are_judged() -> None:
    single = {"share_of_copy_bandwidth": 0.78, "host_gap": 0.06}
    steps = {
        str(tokens): {"seconds": seconds, "device_seconds": seconds - 0.0011}
        for tokens, seconds in ((1, 0.005), (8, 0.0052), (64, 0.009), (320, 0.02))
    }
    targets = {"bfloat16": {"single_stream": single, "curve": steps}}
    exactness = {"share_of_tokens_as_generate": 0.99}
    result = {"targets": targets, "exactness": exactness, "device": {"name": "NVIDIA H100 80GB"}}
    assert [met for _, _, _, met in goals(result)] == [False, True, False, True, False]
    targets["draft"] = {"single_stream": {"share_of_copy_bandwidth": 0.61, "host_gap": 0.06}}
    result["device"] = {"name": "NVIDIA H200"}
    judged = goals(result)
    assert [met for _, _, _, met in judged] == [False, True, False, True, True, True, False, False]
    assert judged[5][:3] == ("ms of a step of 8 tokens", pytest.approx(5.2), "<= 5.3")


def test_what_there_is_no_time_for_is_left_out_and_told() -> None:
    budget = Budget(minutes=10, began=time.monotonic() - 301)
    assert not budget.allows("fp8", share=0.5) and budget.allows("drafts")
    budget.began -= 300
    assert not budget.allows("paths") and budget.left_out == ["fp8", "paths"]


def test_without_a_gpu_it_ends_in_a_sentence() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit, match="there is no CUDA device here"):
        main()
