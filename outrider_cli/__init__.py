"""The command line. What is heavy is imported inside the command that needs it: --help stays quick."""

from __future__ import annotations

import typer

from outrider_cli.bench_command import bench
from outrider_cli.generate import generate
from outrider_cli.keys import keys
from outrider_cli.roles import drafter, router, verifier
from outrider_cli.serve import serve
from outrider_cli.sizing import plan

app = typer.Typer(
    name="outrider",
    help="Serve a language model faster with the help of a small one, with exactly the large one's output.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (serve, generate, router, verifier, drafter, plan, bench):
    app.command()(command)
app.add_typer(keys)


def main() -> None:
    """Runs the command line: the `outrider` entry point."""
    app(prog_name="outrider")
