"""`outrider bench` as it is called, with real processes. The figures are not judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.other_server import other_server
from tests.tiny_models import build, near_copy

ROOT = Path(__file__).parents[2]


def outrider(*arguments: str, program: str = "") -> subprocess.CompletedProcess[str]:
    start = ["-c", program] if program else ["-m", "outrider_cli"]
    return subprocess.run(
        [sys.executable, *start, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=500
    )


def by_cell(result: dict[str, Any]) -> dict[tuple[str, int, float], dict[str, Any]]:
    return {(cell["way"], cell["streams"], cell["rtt_ms"]): cell for cell in result["cells"]}


@pytest.mark.process
@pytest.mark.timeout(600)
def test_everything_is_measured_in_one_run(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    target, draft = min(cores), max(cores)  # one each: few threads wait for one another
    models = build("llama", tmp_path / "target"), near_copy(tmp_path / "target", tmp_path / "draft")
    written = tmp_path / "written"
    ran = outrider(
        *("bench", "--target", str(models[0]), "--draft", str(models[1]), "--kv-memory", "32MiB"),
        *("--workload", "code", "--temperature", "0", "--streams", "1,2", "--rtt", "0,4"),
        *("--repetitions", "1", "--max-tokens", "96", "--cores", f"{target}/{draft}"),
        *("--no-peers", "--write", str(written)),  # test_suite.py has those
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads((written / "result.json").read_text())
    cells = by_cell(result)
    ours = {(way, n, rtt) for way in ("plain", "lock-step", "streaming") for n in (1, 2) for rtt in (0, 4)}
    whole = {("plain, all cores", n, 0) for n in (1, 2) if target != draft}
    assert cells.keys() == ours | whole
    for cell in cells.values():
        assert cell["rate"]["median"] > 0
        assert cell["first_token_ms"][1] >= cell["first_token_ms"][0] > 0
        assert cell["prompt_tokens"] >= 96
        assert cell["tokens_per_target_second"]["median"] > 0
    # Lock-step waits for its drafts. Streaming does not, and so small a target may be faster than they are:
    # what is accepted there is a matter of the machine.
    assert all(cells["lock-step", n, rtt]["acceptance_rate"] > 0 for n in (1, 2) for rtt in (0, 4))
    assert all(0 <= (cells["streaming", n, r]["acceptance_rate"] or 0) <= 1 for n in (1, 2) for r in (0, 4))
    assert cells["plain", 1, 0]["acceptance_rate"] is None
    assert cells["streaming", 1, 4]["over"].keys() == {"plain", "lock-step"}
    assert cells["streaming", 2, 0]["cpu_shares"].keys() == {"target", "draft", "router", "client"}
    if whole:
        assert result["same_text"]["plain, all cores"] == {"same": 2, "requests": 2}
    assert result["same_text"]["streaming"] == result["same_text"]["lock-step"] == {"same": 2, "requests": 2}
    assert result["carried_bytes"] > 1000, "drafts do not pass the line"
    streamed = [cells["streaming", n, rtt]["acceptance_rate"] for n in (1, 2) for rtt in (0, 4)]
    rejected = any(rate is not None and rate < 1 for rate in streamed)
    assert result["rejections"]["count"] > 0 or not rejected, "the drafter told nobody"
    assert 0 <= result["rejections"]["covered"] <= result["rejections"]["count"]
    assert {path.name for path in written.iterdir()} == {
        "result.json",
        "rates.png",
        "streams.png",
        "rtt.png",
    }
    assert "streaming: the same text as plain decoding in 2 of 2 requests" in ran.stdout


def test_another_server_is_measured_by_the_same_client(tmp_path: Path) -> None:
    with other_server() as (url, _):
        ran = outrider(
            *("bench", "--url", url, "--workload", "random", "--temperature", "0", "--streams", "2"),
            *("--repetitions", "2", "--max-tokens", "8", "--write", str(tmp_path)),
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    [cell] = result["cells"]
    assert (cell["way"], cell["streams"], len(cell["repetitions"])) == ("server", 2, 2)
    assert cell["rate"]["median"] > 0
    assert cell["over"] == {}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9: start one"),
        (["--target", "/nowhere", "--draft", "/nowhere", "--no-peers"], "verifier ended before it was ready"),
    ],
)
def test_what_cannot_be_reached_or_started_is_one_sentence(arguments: list[str], sentence: str) -> None:
    ran = outrider("bench", *arguments)
    assert ran.returncode == 1
    assert ran.stderr.startswith(f"outrider bench: {sentence}")
    assert len(ran.stderr.splitlines()) == 1, ran.stderr


def test_pictures_without_matplotlib_are_one_sentence(tmp_path: Path) -> None:
    hidden = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'matplotlib' else find(name, *rest)\n"
        "from outrider_cli import main\nmain()"
    )
    ran = outrider("bench", "--write", str(tmp_path), program=hidden)
    assert (ran.returncode, ran.stderr) == (
        1,
        "outrider bench: pictures need matplotlib: pip install 'outrider[bench]', or leave out --write\n",
    )
