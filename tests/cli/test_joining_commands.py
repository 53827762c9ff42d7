"""What the command line says of drafters that join."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from outrider.options.protection import Protection
from outrider.options.worker import Listen
from outrider_cli.app import app
from outrider_cli.children import Models, Workers, worker_children

JOIN = ["drafter", "--propose", "suffix", "--join", "https://h"]


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (
            ["serve", "--target", "outrider-demo", "--advertise", "h"],
            2,
            "outrider serve: --advertise is of no use without --drafter-tokens: leave it out",
        ),
        (
            ["verifier", "--target", "x", "--router", "h:1", "--join-port", "0"],
            1,
            "outrider verifier: --join-port is for TLS: without it drafters that joined come to --port",
        ),
        (
            ["router", "--drafter-tokens", "nowhere"],
            1,
            "outrider router: --drafter-tokens nowhere: nowhere: no such file",
        ),
        (JOIN, 1, "outrider drafter: --join needs a token"),
        (
            [*JOIN, "--token", "t", "--join-ca", "nowhere"],
            1,
            "outrider drafter: --join-ca nowhere cannot be used: nowhere: no such file",
        ),
        (
            [*JOIN, "--token-file", "nowhere"],
            1,
            "outrider drafter: --token-file cannot be read: nowhere: no such file",
        ),
    ],
)
def test_a_bad_option_is_one_clear_line(
    arguments: list[str], code: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "OUTRIDER_STORE": "redis://127.0.0.1:1"})
    run = CliRunner().invoke(app, arguments, prog_name="outrider")
    assert (run.exit_code, run.stdout) == (code, "")
    assert run.stderr.splitlines()[-1].startswith(line)


def test_serves_verifiers_are_reached_by_drafters_that_join() -> None:
    group: Any = typer.main.get_command(app)
    files = Protection(Path("cert"), Path("key"), Path("ca"))
    for protection, port in ((files, 0), (Protection(insecure=True), None)):
        joined = Listen("0.0.0.0", advertise="h.example.org")
        workers = Workers(verifiers=1, drafters=1, protection=protection, joined=joined)
        verifier, drafter = (
            group.commands[child.role].make_context(child.role, list(child.command[4:])).params
            for child in worker_children(Models("t", "d", "n"), workers, "127.0.0.1:9")
        )
        told = (verifier["host"], verifier["advertise"], verifier["join_port"], verifier["insecure"])
        assert told == ("0.0.0.0", "h.example.org", port, protection.insecure)
        assert (drafter["host"], drafter["insecure"]) == ("127.0.0.1", False)
