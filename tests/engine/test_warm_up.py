"""What is compiled before an engine serves is there on its own thread, and nothing is compiled after that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters

from outrider.engine.engine import Engine, Work
from outrider.engine.fusing import fused, unfuse
from outrider.engine.loading import load_engine, use_threads
from outrider.engine.paged_attention import PagedAttention
from outrider.engine.parts import Parts
from outrider.engine.rank_group import follow
from outrider.engine.reference_attention import KERNEL as REFERENCE
from outrider.engine.runner import CallByCall
from outrider.engine.self_check import reference
from outrider.engine.step_message import Kind, Words, encode
from outrider.engine.warm_up import _steps, warm_up
from outrider.sampling.vocab_parallel import Draws

MOST_TOKENS = 128
GPU = torch.device("cuda")  # none is needed: this is about the host's threads


def compiled() -> int:
    return int(counters["stats"]["unique_graphs"])


def on_gpu_threads(folder: Path) -> Engine:
    """An engine with compiled layers, made as for a GPU. The compiler makes no code of them here."""
    use_threads(GPU, 3)
    running = load_engine(str(folder), dtype="bfloat16", kv_memory_bytes=2**24, parts=Parts())
    running.model.set_attn_implementation("eager")
    expected = reference(running.model, running.info)
    found = Engine(running.model, running.info, PagedAttention.on(running.model, 256, REFERENCE))
    counters.clear()
    assert fused(found, expected, "eager")
    return found


@pytest.fixture
def engine(checkpoint: Callable[..., Path]) -> Iterator[Engine]:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)  # as another thread has by itself on a machine of three cores
    with ThreadPoolExecutor(1) as loading:
        found = loading.submit(on_gpu_threads, checkpoint("llama")).result()
    found.threads = 1  # as on a GPU
    yield found
    found.close()
    unfuse(found.model)
    torch._dynamo.reset()
    torch.set_num_threads(threads)


def step_of(engine: Engine, tokens: int) -> torch.Tensor:
    return engine.step([Work(list(range(16)), 0, [1] * tokens, 1)]).clone()


async def test_the_engines_thread_finds_what_the_loading_thread_had_compiled(engine: Engine) -> None:
    before = compiled()
    assert before > 0
    for tokens in (30, 7, 12):
        await engine.run(step_of, engine, tokens)
    assert compiled() == before


async def test_nothing_is_compiled_once_an_engine_is_warm(engine: Engine) -> None:
    await engine.run(warm_up, engine, MOST_TOKENS, 4)
    before = compiled()
    for tokens in (1, 30, 128, 2):
        await engine.run(step_of, engine, tokens)
    assert compiled() == before, "steps of sizes that it was not warmed with"
    expected = await engine.run(step_of, engine, 9)
    await engine.run(torch.set_num_threads, 2)  # compiled code is for one
    assert torch.equal(await engine.run(step_of, engine, 9), expected)
    assert compiled() == before, "what was not compiled runs as it is"


async def test_no_process_of_a_group_compiles_once_the_leader_is_warm(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a follower compiled later would hold its leader up until that counts as hung."""
    told = [encode(Kind.STOP)]

    def step(kind: Kind, works: Words | None, draws: Draws | None = None) -> AbstractContextManager[None]:
        if kind is Kind.WARM:
            told.insert(0, encode(kind))
        return nullcontext()

    monkeypatch.setattr(engine.group, "step", step)
    await engine.run(warm_up, engine, MOST_TOKENS)
    monkeypatch.undo()
    before = compiled()
    engine.runner = CallByCall(engine.model, engine.attention, engine.group)
    ranks = SimpleNamespace(receive=lambda: torch.from_numpy(told.pop(0)))
    await engine.run(follow, engine, ranks)
    await engine.run(torch.set_num_threads, 2)  # compiled code is for one
    await engine.run(step_of, engine, 9)
    assert compiled() == before and not told


def test_steps_of_more_sessions_than_are_recorded_are_run_before(engine: Engine) -> None:
    """With room for 2,048 tokens in a step the kernels of attention were compiled while sessions waited."""
    steps = _steps(engine, 2048)
    assert [len(counts) for counts in steps if len(counts) > 300] == [513, 1025]
    assert max(map(len, _steps(engine, 512))) <= 512


def test_an_engine_of_which_nothing_is_compiled_needs_no_warming(checkpoint: Callable[..., Path]) -> None:
    plain = load_engine(str(checkpoint("llama")), kv_memory_bytes=2**22)
    plain.choose = None  # type: ignore[assignment,method-assign]  # no step runs
    warm_up(plain, MOST_TOKENS)
