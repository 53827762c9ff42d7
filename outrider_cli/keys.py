"""`outrider keys`: API keys for `--api-keys`, and tokens for `--drafter-tokens`."""

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
        typer.Option(
            min=1,
            help="Most requests, or drafters, at a time, in each router.",
            show_default="no limit; 64 drafters",
        ),
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
    tokens: Annotated[
        Path | None,
        typer.Option(
            "--drafter-tokens",
            metavar="FILE",
            help="Make a token with which drafters join instead, and add its line to this file.",
            show_default="none: it is an API key",
        ),
    ] = None,
) -> None:
    """Make an API key, or a token for drafters. It is shown once; what is stored is a line with its hash."""
    from router.api.keys import KEY_PREFIX, NAME, TOKEN_PREFIX, ApiKey, digest, new_key

    if not NAME.fullmatch(name):
        fail("keys", f"{name!r} is no name: use up to 64 letters, digits, '.', '_' and '-'")
    if tokens is not None and file is not None:
        fail("keys", "--api-keys and --drafter-tokens are for one kind of secret each: leave one out")
    if tokens is not None and requests_per_minute is not None:
        fail("keys", "--requests-per-minute is for API keys: drafters that join make none")
    key = new_key(KEY_PREFIX if tokens is None else TOKEN_PREFIX)
    line = ApiKey(name, digest(key), max_concurrent, requests_per_minute).line
    kept = tokens or file
    if kept is not None:
        with reported("keys"), kept.open("a", encoding="utf-8") as stored:
            stored.write(line + "\n")
    print(f"{'key' if tokens is None else 'token'}, for {name} alone, not shown again: {key}")
    print(f"line, in {kept}: {line}" if kept is not None else f"line, for --api-keys FILE: {line}")
