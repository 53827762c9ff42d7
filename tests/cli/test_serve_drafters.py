"""Which drafters `outrider serve` starts, and how many of them a session may have."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from outrider.options.sessions import SessionOptions
from outrider.options.telemetry import Logging
from outrider_cli.app import app
from outrider_cli.children import Models, Workers, router_child, worker_children
from outrider_cli.serve import choose_models
from router.config import RouterConfig


def test_a_draft_model_and_something_beside_it_are_drafters_that_each_session_may_have() -> None:
    workers, models = Workers(verifiers=1, drafters=2), Models("t", "d", "t", "suffix")
    drafters = worker_children(models, workers, "127.0.0.1:9")[1:]
    assert [child.name for child in drafters] == ["drafter-1", "drafter-2", "drafter-suffix"]
    group: Any = typer.main.get_command(app)
    told = [
        group.commands["drafter"].make_context("drafter", list(child.command[4:])).params
        for child in drafters
    ]
    assert [(one["draft"], one["propose"]) for one in told] == [("d", None)] * 2 + [(None, "suffix")]
    for asked, given in ((1, 2), (3, 3)):
        config = RouterConfig(sessions=SessionOptions(drafters_per_session=asked))
        child = router_child(models, config, Logging())
        values = group.commands["router"].make_context("router", list(child.command[4:])).params
        assert values["drafters_per_session"] == given
    alone = router_child(Models("t", None, "t", "suffix"), RouterConfig(), Logging())
    assert "--drafters-per-session" not in alone.command


def test_a_speculator_is_its_targets_and_starts_no_drafter() -> None:
    models = choose_models("t", None, 1, None, "s")
    (verifier,) = worker_children(models, Workers(verifiers=1, drafters=1), "127.0.0.1:9")
    assert verifier.command[verifier.command.index("--speculator") + 1] == "s"
    assert models.alone == Models("t", None, "t") and not models.drafts
    beside = worker_children(choose_models("t", "d", 1, None, "s"), Workers(1, 1), "127.0.0.1:9")
    assert [child.name for child in beside] == ["verifier", "drafter"]
    assert "--speculator" not in beside[1].command


def test_a_speculator_without_its_target_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        choose_models(None, None, 1, None, "s", "bench")
    said = capsys.readouterr().err
    assert said.startswith("outrider bench: --speculator is given without --target: name the target")
