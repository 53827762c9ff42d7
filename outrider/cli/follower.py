"""`outrider follower`: a process that holds a part of a worker's model. Started by the worker."""

from __future__ import annotations

import json
import os
import signal
from typing import Annotated

import typer

from outrider.cli.reporting import FAILED, reported


def follower(
    spec: Annotated[str, typer.Argument(help="Its place and its model, as JSON.")],
    parent: Annotated[int, typer.Option(help="Process id of the worker that it ends with.")],
) -> None:
    """Hold a part of a worker's model."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group: the worker says when it is over
    threads = str(json.loads(spec)["threads"])
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = threads  # read when torch is imported
    with reported("follower"):
        from outrider.errors import StartupError
        from outrider.followers import FollowerSpec, die_with, follow

        die_with(parent)
        try:
            follow(FollowerSpec.from_json(spec))
        except StartupError:  # the worker has been told, and says it
            raise typer.Exit(FAILED) from None
