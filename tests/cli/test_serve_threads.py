"""How `outrider serve` divides the cores."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.errors import StartupError
from outrider.options.engine import EngineOptions
from outrider.options.option import build
from outrider_cli import serve
from outrider_cli.children import Models, worker_children
from verifier.config import VerifierConfig


@pytest.mark.parametrize(
    ("told", "threads", "resting"),
    [
        ({}, 2, 4),
        ({"verifiers": 2}, 1, 2),
        ({"threads": 1}, 1, None),  # the cores are the user's to divide
        ({"compare": False}, 2, None),
        ({"device": "cuda"}, 2, None),
    ],
)
def test_a_verifier_has_the_drafters_cores_while_they_rest(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, Any], threads: int, resting: int | None
) -> None:
    monkeypatch.setattr(serve.os, "sched_getaffinity", lambda _: set(range(4)))
    workers = serve._workers(build(serve.ServeOptions, {"target": "T", **told}), Models("T", "D", "T"))
    assert (workers.engine.threads, workers.resting_threads) == (threads, resting)
    verifier = worker_children(Models("T", "D", "T"), workers, "127.0.0.1:9")[0]
    assert ("--resting-threads" in verifier.command) is (resting is not None)


@pytest.mark.parametrize(
    ("told", "threads", "other"),
    [
        ({}, 4, 2),
        ({"verifiers": 2}, 2, 1),
        ({"threads": 1}, 1, None),
        ({"compare": False}, 4, None),
    ],
)
def test_what_looks_guesses_up_takes_no_core_of_the_target(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, Any], threads: int, other: int | None
) -> None:
    monkeypatch.setattr(serve.os, "sched_getaffinity", lambda _: set(range(4)))
    models = Models("T", None, "T", "suffix")
    workers = serve._workers(build(serve.ServeOptions, {"target": "T", **told}), models)
    assert (workers.engine.threads, workers.resting_threads) == (threads, other)


def test_threads_for_a_rest_that_never_comes_are_refused() -> None:
    with pytest.raises(StartupError, match="--resting-threads is of no use with --no-compare"):
        VerifierConfig("T", compare=False, resting_threads=2)
    with pytest.raises(StartupError, match="--resting-threads is for a model on a CPU"):
        VerifierConfig("T", engine=EngineOptions(device="cuda"), resting_threads=2)
