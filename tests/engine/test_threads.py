"""Which threads have helpers of OpenMP's: more of them than cores would sleep between two products."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forked import said

PROGRAM = """
import asyncio, os, sys
from concurrent.futures import ThreadPoolExecutor
import torch
from outrider.engine.engine import Work
from outrider.engine.loading import load_engine

def threads():
    return set(os.listdir("/proc/self/task"))

async def main():
    with ThreadPoolExecutor(1) as loading:
        how = {"kv_memory_bytes": 2**24, "threads": 2, "dtype": "bfloat16"}  # in which torch computes
        engine = loading.submit(load_engine, sys.argv[1], **how).result()
    print(engine.threads, await engine.run(torch.get_num_threads), torch.get_num_threads())
    works = [Work(list(range(32)), 0, [1] * 400, 1)]  # a mask of 400 times 400 and more: worth two threads
    before = threads()  # the loading thread and its helper may still be on their way out: only new ones count
    await engine.run(engine.step, works)
    print(len(threads() - before))
    for _ in range(3):
        engine.prepare(works)
    print(len(threads() - before))
    engine.close()

asyncio.run(main())
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in Linux's /proc")
def test_only_the_engines_thread_has_helpers(checkpoint: Callable[..., Path]) -> None:
    threads, by_a_step, by_inputs = said(("-c", PROGRAM, str(checkpoint("llama")))).splitlines()
    assert threads == "2 2 1", "of the engine, of its thread, of the event loop's"
    assert by_a_step == "1", "the engine's thread has a helper"
    assert by_inputs == "1", "building inputs has made helpers for the event loop's thread"
