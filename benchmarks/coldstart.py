"""Measures the seconds from nothing to the first answer of a Ray cluster.

    python benchmarks/coldstart.py --write benchmarks/results/NAME.json

Starts a Ray head and two nodes on hosts of their own (network namespaces, so it needs root), deploys the
application of deploy/app.py with its draft and target pools on different hosts, and asks it. Each run starts
from no process at all; files that a run before has read may be in the page cache.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.keep import Write, keep
from demo.heldout import heldout_prompts
from outrider_cli.bench.figures import Spread
from tests.cluster.client import Request
from tests.cluster.hosts import switched
from tests.cluster.namespace import missing
from tests.cluster.ray_cluster import application, ray_cluster


def start(target: Path, draft: Path, request: Request) -> dict[str, float]:
    """Returns the seconds from the beginning until each stage was reached, in order."""
    reached: dict[str, float] = {}
    began = time.monotonic()

    def note(stage: str) -> None:
        reached[stage] = round(time.monotonic() - began, 3)
        print(f"{reached[stage]:6.1f} s  {stage}", flush=True)

    with (
        switched("head", "draft", "target", "client") as hosts,
        ray_cluster(hosts["head"], {pool: hosts[pool] for pool in ("draft", "target")}) as cluster,
    ):
        note("cluster_up")
        cluster.serve(application(target, draft))
        note("all_pools_serving")
        cluster.client(hosts["client"]).ask(request)
        note("first_answer")
    return reached


def main(
    target: Annotated[Path, typer.Option(help="Folder of the target.")] = Path("demo/models/target"),
    draft: Annotated[Path, typer.Option(help="Folder of the draft model.")] = Path("demo/models/draft"),
    runs: Annotated[int, typer.Option(min=1, help="Starts, one after the other.")] = 3,
    write: Write = None,
) -> None:
    """Start a cluster of three hosts and ask it, several times."""
    if reason := missing():
        raise SystemExit(f"this benchmark makes hosts out of network namespaces: {reason}")
    load_before = os.getloadavg()[0]  # of the last minute: what else the machine did
    request = {"prompt": heldout_prompts(1)[0], "max_tokens": 16, "temperature": 0}
    starts = [start(target.resolve(), draft.resolve(), request) for _ in range(runs)]
    seconds = {stage: Spread.of([one[stage] for one in starts]) for stage in starts[0]}
    result = {
        "load_before": load_before,
        "ray": version("ray"),
        **{f"seconds_until_{stage}": asdict(value) for stage, value in seconds.items()},
        "starts": starts,
    }
    for stage, value in seconds.items():
        print(f"seconds until {stage}: {value}")
    keep(write, result)


if __name__ == "__main__":
    typer.run(main)
