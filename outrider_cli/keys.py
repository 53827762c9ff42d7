"""`outrider keys`: API keys for `--api-keys`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider_cli.reporting import fail, reported

keys = typer.Typer(name="keys", help="Make API keys.", no_args_is_help=True, rich_markup_mode=None)


@keys.callback()
def _keys() -> None:
    """Make API keys."""


@keys.command()
def add(
    name: Annotated[str, typer.Argument(help="Whose key it is; seen in metrics.")],
    max_concurrent: Annotated[
        int | None,
        typer.Option(min=1, help="Most requests at a time, in each router.", show_default="no limit"),
    ] = None,
    requests_per_minute: Annotated[
        int | None,
        typer.Option(min=1, help="Most requests a minute, in each router.", show_default="no limit"),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--api-keys", metavar="FILE", help="File to add the line to.", show_default="none: it is printed"
        ),
    ] = None,
) -> None:
    """Make a key. It is shown once; what is stored is a line with its hash."""
    from router.api.keys import NAME, ApiKey, digest, new_key

    if not NAME.fullmatch(name):
        fail("keys", f"{name!r} is no name: use up to 64 letters, digits, '.', '_' and '-'")
    key = new_key()
    line = ApiKey(name, digest(key), max_concurrent, requests_per_minute).line
    if file is not None:
        with reported("keys"), file.open("a", encoding="utf-8") as stored:
            stored.write(line + "\n")
    print(f"key, for {name} alone, not shown again: {key}")
    print(f"line, in {file}: {line}" if file is not None else f"line, for --api-keys FILE: {line}")
