"""Keeps what a benchmark found, with what it takes to run it again."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from outrider_cli.bench.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]

Write = Annotated[Path | None, typer.Option(help="File to keep the result in, as JSON.")]
Target = Annotated[str, typer.Option(help="Folder of the target.")]
Draft = Annotated[str, typer.Option(help="Folder of the draft model; empty = none.")]


def keep(write: Path | None, found: Mapping[str, object]) -> None:
    """Writes what was found as JSON, with the command, the machine and the versions; None = nowhere."""
    if write is not None:
        program = os.path.relpath(sys.argv[0], ROOT)
        about = {"command": " ".join(["python", program, *sys.argv[1:]]), **provenance()}
        write.write_text(json.dumps({**about, **found}, indent=1) + "\n", encoding="utf-8")
