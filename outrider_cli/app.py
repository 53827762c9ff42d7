"""The command line. What is heavy is imported inside the command that needs it: --help stays quick."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider import __version__
from outrider_cli.batch import batch
from outrider_cli.bench_command import bench
from outrider_cli.commands import Headed
from outrider_cli.distill import distill
from outrider_cli.doctor_command import doctor
from outrider_cli.generate import generate
from outrider_cli.keys import keys
from outrider_cli.roles import drafter, router, verifier
from outrider_cli.serve import serve
from outrider_cli.sizing import plan
from outrider_cli.top import top

app = typer.Typer(
    name="outrider",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (serve, generate, router, verifier, drafter, distill, plan, bench, batch, top, doctor):
    app.command(cls=Headed)(command)
app.add_typer(keys)


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def described(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Tell the version.")
    ] = False,
) -> None:
    """Serve a language model faster with the help of a small one, with exactly the large one's output."""
