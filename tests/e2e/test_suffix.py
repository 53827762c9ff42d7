"""`outrider serve --propose suffix`: drafts without a draft model, by real processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import guesses
from tests.e2e.conftest import Alone, Eventually, Serve, start
from tests.e2e.test_serve import ask_all, cases, check, metric

pytestmark = pytest.mark.process

MOST_BYTES = 150 * 2**20  # of the drafter's memory; it takes some 80 MB, torch alone would take over 200

AT_EXIT = """
import atexit, gc, sys
from pathlib import Path

def tell():
    role = next((one for one in ("router", "verifier", "drafter") if one in sys.argv[1:2]), "other")
    (Path(__file__).parent / role).write_text(f"{gc.get_freeze_count()} {len(gc.get_objects())}")

atexit.register(tell)
"""


@pytest.fixture(scope="module")
def told_at_exit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each process tells what its garbage collector passes over, and what it does not."""
    folder = tmp_path_factory.mktemp("at-exit")
    (folder / "sitecustomize.py").write_text(AT_EXIT)
    return folder


@pytest.fixture(scope="module")
def looked_up(told_at_exit: Path) -> Iterator[Serve]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(told_at_exit), prepend=":")
        running = start("--propose", "suffix", "--no-compare")  # drafts do not rest, however busy this is
    yield running
    if running.process.poll() is None:
        running.end()


async def test_its_drafts_are_taken_and_every_text_is_the_targets_own(looked_up: Serve, alone: Alone) -> None:
    http_cases, grpc_cases, accepted = cases(12), cases(4), 0.0
    while not accepted:  # texts of 40 tokens may be over before a drafter has a turn of a busy core
        texts, tokens = await ask_all(looked_up, http_cases, grpc_cases)
        check(alone, list(zip(http_cases, texts, strict=True)), list(zip(grpc_cases, tokens, strict=True)))
        accepted = metric(looked_up, "vllm:spec_decode_num_accepted_tokens_total")
    assert looked_up.child("drafter").memory_info().rss < MOST_BYTES


def test_the_benchmark_of_guesses_runs(looked_up: Serve, tmp_path: Path) -> None:
    asked = "copy-edit,json of choices"  # the others are tests/e2e/test_guesses.py's
    guesses.main(looked_up.url, max_tokens=32, repetitions=1, workloads=asked, write=tmp_path / "result.json")
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert rows["copy-edit, no drafts"]["tokens_a_step"] == [1.0]
    assert rows["copy-edit, drafts and prediction"]["tokens_a_step"][0] >= 1.0
    assert rows["json of choices, drafts"]["tokens_a_step"][0] > 1.5  # keys are forced


async def test_one_that_is_killed_is_replaced_and_changes_nothing(
    looked_up: Serve, alone: Alone, eventually: Eventually
) -> None:
    asked_for = cases(12)
    before = metric(looked_up, "vllm:generation_tokens_total")
    asked = asyncio.create_task(ask_all(looked_up, asked_for, []))
    while await asyncio.to_thread(metric, looked_up, "vllm:generation_tokens_total") < before + 50:
        pass
    looked_up.child("drafter").kill()
    texts, _ = await asked
    check(alone, list(zip(asked_for, texts, strict=True)), [])
    ready = "(suffix, without a model)"  # said once by each
    await asyncio.to_thread(
        eventually, lambda: sum(ready in line for line in list(looked_up.said)) == 2, "another joins"
    )


def test_full_rounds_of_garbage_collection_pass_over_what_was_there_before_it_served(
    looked_up: Serve, told_at_exit: Path
) -> None:
    """The last test here: the service ends."""
    looked_up.end()
    for role in ("router", "verifier", "drafter"):
        passed_over, left = (int(count) for count in (told_at_exit / role).read_text().split())
        assert passed_over > 10 * left, (role, passed_over, left)
