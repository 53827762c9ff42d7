"""Tries every causal-LM architecture of the installed transformers, and writes docs/models.md.

python -m tests.zoo [--seeds N] [--out FILE] [--update] [MODEL_TYPE ...]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path

from outrider_cli.bench.provenance import machine
from tests.zoo.report import SERVED, Row, page
from tests.zoo.shapes import model_types
from tests.zoo.verdict import Outcome, Verdict, tried

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def verdicts(pool: Executor, types: Sequence[str], seed: int, dtype: str) -> Iterator[tuple[str, Verdict]]:
    """Yields each type's verdict, and prints it."""
    jobs = [pool.submit(tried, name, seed, dtype) for name in types]
    for name, job in zip(types, jobs, strict=True):
        found = job.result()
        print(f"{name}, {dtype}, seed {seed}: {found.outcome.value}. {found.reason}", flush=True)
        yield name, found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("model_types", nargs="*")
    parser.add_argument("--seeds", type=int, default=1, help="random checkpoints of each architecture")
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.add_argument("--update", action="store_true", help="leave the rows of other architectures")
    told = parser.parse_args(arguments)
    rows: dict[str, Row] = {}
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawned) as pool:
        for seed in range(told.seeds):
            types = [
                name
                for name in (told.model_types or model_types())
                if not seed or rows[name].float32.outcome in SERVED
            ]
            for name, found in verdicts(pool, types, seed, "float32"):
                rows[name] = rows[name].with_seed(found) if seed else Row(name, found)
        types = [name for name in rows if rows[name].float32.outcome in SERVED]
        for name, found in verdicts(pool, types, 0, "bfloat16"):
            rows[name] = rows[name].with_bfloat16(found)
    before = told.out.read_text() if told.update else ""
    told.out.write_text(page(list(rows.values()), told.seeds, machine(), before))
    return sum(row.float32.outcome is Outcome.WRONG for row in rows.values())


if __name__ == "__main__":
    raise SystemExit(main())
