"""The suite's prompts, how they are asked, and how much of an answer only repeats itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from demo import pair
from outrider.errors import OutriderError
from outrider.options.option import build
from outrider_cli.bench.client import _asked
from outrider_cli.bench.loops import looped_share
from outrider_cli.bench.suite import messages, suite
from outrider_cli.bench.workloads import WORKLOADS, prompts
from outrider_cli.bench_command import BenchOptions, settings_of

ROOT = Path(__file__).parents[2]
CATEGORIES = ("chat", "translation", "summarisation", "questions", "arithmetic", "retrieval", "coding")


def test_every_category_has_ten_different_conversations_that_end_with_the_user() -> None:
    assert tuple(suite()) == (*CATEGORIES, "copy-edit")
    assert not suite().keys() & WORKLOADS.keys(), "a name would be another's prompts"
    for category, found in suite().items():
        assert len(set(found)) == len(found) >= 10
        assert all(messages(each)[-1]["role"] == "user" for each in found)
        assert len(prompts(category, 3)) == len(found), "all are asked, whatever the streams"
    assert all(len(messages(each)) == 3 for each in suite()["chat"])


def test_a_conversation_is_asked_as_one() -> None:
    assert _asked("x = 1") == ("/v1/completions", {"prompt": "x = 1"})
    path, field = _asked(("Hello", "Good day", "Who are you?"))
    assert path == "/v1/chat/completions"
    assert [each["role"] for each in field["messages"]] == ["user", "assistant", "user"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("", 0.0),
        ("one two three four five six seven eight nine ten", 0.0),
        ("path, " * 10, 18 / 20),  # the first time is no repetition
        ("a b c d e f g h " + "1 2 3 4 5 6 7 8 " + "a b c d e f g h", 8 / 24),
        ("a b c d e f g " + "1 2 3 4 5 6 7 8 " + "a b c d e f g", 0.0),
    ],
)
def test_what_was_said_before_is_a_loop_from_eight_words_on(text: str, share: float) -> None:
    assert looped_share(text) == pytest.approx(share)


def test_the_suite_asks_each_conversation_once_and_measures_what_serve_serves() -> None:
    told = build(BenchOptions, {"suite": True, "target": pair.NAME, "streams": "1", "rtt": "0"})
    settings = settings_of(told)
    assert settings.workloads == tuple(suite())
    assert settings.repetitions == 10
    assert settings_of(build(BenchOptions, {"target": pair.NAME})).repetitions == 3


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (
            {"url": "http://x", "target": "t"},
            "--target is of what a run starts itself: leave it out, or --url",
        ),
        ({"url": "http://x", "propose": "suffix"}, "--propose is of what a run starts itself"),
        ({"url": "http://x", "cores": "0/1"}, "--cores is of what a run starts itself"),
        ({"suite": True, "workload": "code"}, "--workload must be of the suite's, chat, .*, not code"),
        ({"model": "m"}, "--model is the name at a server that --url says: leave it out"),
    ],
)
def test_what_does_not_go_together_is_refused(told: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OutriderError, match=sentence):
        settings_of(build(BenchOptions, told))


@pytest.mark.process
def test_the_suite_is_measured_beside_plain_decoding_and_transformers(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "outrider_cli", "bench", "--suite", "--target", pair.NAME),
            *("--propose", "suffix", "--workload", "questions", "--repetitions", "1", "--max-tokens", "16"),
            *("--streams", "1", "--temperature", "0", "--rtt", "0", "--kv-memory", "32MiB", "--no-lock-step"),
            *("--cores", f"{core}/{core}", "--price-per-hour", "0.5"),
            *("--write", str(tmp_path)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for way in ("plain", "streaming", "transformers", "assisted", "assisted, tuned"):
        assert [line for line in ran.stdout.splitlines() if line.strip().startswith(f"{way} ")], ran.stdout
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["transformers_tuned_k"][0]["k"] >= 1
    [over] = [cell["over"] for cell in result["cells"] if cell["way"] == "streaming"]
    assert {"plain", "assisted, tuned"} <= over.keys()
    assert "loops" in ran.stdout and "a million" in ran.stdout
    assert "streaming: the same text as plain decoding in 1 of 1 requests" in ran.stdout
    assert "transformers: the same text as plain decoding in 1 of 1 requests" in ran.stdout
