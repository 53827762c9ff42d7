"""What is shown while everything starts."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from outrider_cli.display import ServeDisplay

LONG = "  curl http://127.0.0.1:8000 " + "x" * 200


def show(terminal: bool) -> str:
    out = io.StringIO()
    display = ServeDisplay(Console(file=out, force_terminal=terminal, width=60, color_system=None))
    display.starting("router")
    display.line("router", "[bold]not markup[/] " + "y" * 100)
    display.ready("router")
    display.starting("verifier-1")
    display.ready("verifier-1")
    display.note("a word")
    display.block(LONG)
    display.close()
    return out.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_lines_are_whole_and_literal(terminal: bool) -> None:
    shown = show(terminal)
    assert "  router | [bold]not markup[/] " + "y" * 100 + "\n" in shown
    assert "outrider | a word\n" in shown
    assert LONG + "\n" in shown


def test_spinners_are_for_terminals() -> None:
    assert "verifier-1 starting" in show(terminal=True)
    assert "\x1b" not in show(terminal=False)
    assert "outrider | starting verifier-1\n" in show(terminal=False)
