"""A target that is divided among processes gives the tokens of the whole one."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest

from outrider.engine.engine import Engine, Step, Work
from outrider.engine.flat_inputs import Shape
from outrider.engine.kv_blocks import BlockTable
from outrider.engine.loading import load_engine
from outrider.engine.parts import Parts
from outrider.engine.replayed import Replayed
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row, TokenCounts
from outrider.v1 import generation_pb2_grpc
from tests.cluster.process import Process
from tests.e2e.conftest import DRAFT, KV_MEMORY, Alone, Serve, left_behind, start
from tests.e2e.test_serve import cases, over_grpc
from tests.follower_pool import KV_BYTES, Pool, divided
from tests.plain_http import HTTP
from tests.tiny_models import build

VOCAB = 199
OUTPUT = 16
SERVED = 24  # tokens of an answer of the service
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=1.0, seed=2**64 - 1),
    SamplingParams(temperature=1.3, top_k=20, min_p=0.02, seed=2),
    SamplingParams(temperature=0.7, top_p=0.9, presence_penalty=0.7, repetition_penalty=1.2, seed=4),
    SamplingParams(temperature=0.0, repetition_penalty=1.5),
    SamplingParams(temperature=0.9, logit_bias={3: 4.0, 7: -100.0}, seed=5),
    SamplingParams(temperature=0.6, seed=6),
]
# Of those that tests/engine/test_sharded.py has, which finds the same bits in any chunks, none is here.
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("qwen2", 2, {}),
    ("gemma3", 2, {"layer_types": ["sliding_attention", "full_attention"]}),
    ("mixtral", 2, {}),
    ("phi3", 2, {}),
    ("gpt_neox", 2, {}),
    ("llama", 3, {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}),
    ("qwen3", 2, {"tie_word_embeddings": True}),
]


COMBINED: list[tuple[str, int, dict[str, Any]]] = [("mixtral", 2, {}), CASES[-1]]


@dataclass
class Session:
    """A request as it runs: `expected` is all that it will hold at its end, where that is known."""

    log: list[int]
    sampling: SamplingParams
    end: int
    expected: list[int]
    counts: TokenCounts
    table: BlockTable = field(default_factory=BlockTable)
    accepted: int = 0

    @property
    def done(self) -> bool:
        return len(self.log) == self.end


def sessions(expected: Sequence[Sequence[int]] = ()) -> list[Session]:
    rng = random.Random(3)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(length)] for length in (1, 2, 7, 16, 33, 40, 65, 90)]
    return [
        Session(
            list(prompt),
            SAMPLINGS[index],
            len(prompt) + OUTPUT,
            list(expected[index]) if expected else [],
            TokenCounts(prompt),
        )
        for index, prompt in enumerate(prompts)
    ]


def part_of(session: Session, rng: random.Random) -> tuple[Work, list[int], list[Row]]:
    """A chunk of what is pending and, after its end, drafts that are right up to a random place."""
    at = session.table.length
    tokens = session.log[at:][: rng.randrange(1, 30)]
    final = at + len(tokens) == len(session.log)
    drafts: list[int] = []
    if final and session.expected:
        drafts = session.expected[len(session.log) :][
            : min(rng.randrange(0, 9), session.end - len(session.log) - 1)
        ]
        wrong = rng.randrange(0, 12)
        drafts[wrong:] = [rng.randrange(VOCAB) for _ in drafts[wrong:]]
    rows = len(drafts) + 1 if final else 0
    return (
        Work(session.table.blocks, at, [*tokens, *drafts], rows),
        drafts,
        [Row(session.sampling, len(session.log) + i, session.counts, drafts[:i]) for i in range(rows)],
    )


def run(engine: Engine, running: list[Session], rng: random.Random) -> list[list[int]]:
    """All sessions to their end in ragged steps; their logs."""
    while active := [session for session in running if not session.done and rng.random() < 0.9] or [
        session for session in running if not session.done
    ]:
        parts = [(session, *part_of(session, rng)) for session in active]
        for session, work, _, _ in parts:
            engine.pool.extend(session.table, len(work.tokens))
        inputs = engine.prepare([work for _, work, _, _ in parts])
        chosen = engine.choose(inputs, [row for *_, rows in parts for row in rows])
        for session, work, drafts, rows in parts:
            picked, chosen = chosen[: len(rows)], chosen[len(rows) :]
            if not work.rows:
                continue
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == picked[accepted]:
                accepted += 1
            standing = len(session.log) + accepted
            new = picked[: accepted + 1]
            session.log += new
            session.counts.extend(new)
            session.accepted += accepted
            engine.pool.truncate(session.table, standing)
        assert not chosen
        engine.pool.check_integrity(session.table for session in running)
    for session in running:
        engine.pool.close(session.table)
    return [session.log for session in running]


class ShapesRun:
    """What shapes an engine's steps have from now on."""

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine.runner, Replayed)
        self.recorded: set[Shape] = set()
        self.others = 0
        graphs, prepare = engine.runner.graphs, engine.prepare

        def noting(works: Sequence[Work]) -> Step:
            step = prepare(works)
            if step.prepared.shape in graphs.shapes:
                self.recorded.add(step.prepared.shape)
            else:
                self.others += 1
            return step

        engine.prepare = noting  # type: ignore[method-assign]


def one_by_one(engine: Engine) -> list[list[int]]:
    """Each session alone, without drafts."""
    return [run(engine, [session], random.Random(7))[0] for session in sessions()]


@pytest.mark.parametrize(("arch", "size", "overrides"), CASES, ids=lambda value: str(value))
def test_a_divided_model_gives_the_whole_ones_tokens(
    arch: str, size: int, overrides: dict[str, Any], pool: Pool, tmp_path: Path
) -> None:
    folder = build(arch, tmp_path, num_hidden_layers=2, **overrides)
    whole = load_engine(str(folder), kv_memory_bytes=KV_BYTES, threads=1)
    expected = one_by_one(whole)
    assert len({token for log in expected for token in log[-OUTPUT:]}) > 50, "the text does not vary"
    with divided(folder, size, pool.start) as engine:
        assert engine.info.bit_exact and engine.info.tensor_parallel_size == size
        assert engine.info.fingerprint == whole.info.fingerprint
        assert engine.info.parameters == whole.info.parameters
        running = sessions(expected)
        assert run(engine, running, random.Random(8)) == expected
        assert sum(session.accepted for session in running) > 25
    assert pool.last == ["stopped"] * (size - 1)


@pytest.mark.parametrize(("arch", "size", "overrides"), COMBINED, ids=lambda value: str(value))
def test_kernel_and_recorded_steps_of_a_divided_model_give_the_whole_ones_tokens(
    arch: str, size: int, overrides: dict[str, Any], pool: Pool, tmp_path: Path
) -> None:
    """What a target divided among GPUs runs by, with a kernel of plain torch, and calls for records."""
    folder = build(arch, tmp_path, num_hidden_layers=2, **overrides)
    expected = one_by_one(load_engine(str(folder), kv_memory_bytes=KV_BYTES, threads=1))
    with divided(folder, size, pool.start, Parts(("reference",), "called-again", "packed")) as engine:
        assert (engine.attention.name, engine.runner.name, engine.group.size) == (
            "reference",
            "replayed",
            size,
        )
        ran = ShapesRun(engine)
        running = sessions(expected)
        assert run(engine, running, random.Random(8)) == expected
        assert sum(session.accepted for session in running) > 25
        assert len(ran.recorded) > 3 and ran.others == 0
    assert pool.last == ["stopped"] * (size - 1)


# -- as processes --


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    # In lock-step drafts are waited for, however busy the machine is.
    running = start("--tensor-parallel-size", "2", "--drafters", "0", "--lock-step")
    yield running
    children = psutil.Process(running.process.pid).children(recursive=True)
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(120) == 0, "".join(running.said[-30:])
    assert not left_behind(children)


@pytest.fixture(scope="module")
def drafter(serve: Serve) -> Iterator[None]:
    """A drafter that is divided too."""
    options = ["--draft", str(DRAFT), "--router", serve.grpc_address, "--tensor-parallel-size", "2"]
    options += ["--kv-memory", KV_MEMORY]
    process = Process((sys.executable, "-m", "outrider_cli", "drafter", *options), {})
    try:
        process.wait_for("drafter ready")
        yield
        process.signal(signal.SIGTERM)
        process.wait(120)
    finally:
        process.kill()


def accepted(serve: Serve) -> float:
    """Drafted tokens accepted so far."""
    metrics = HTTP.get(f"{serve.url}/metrics").text
    found = re.findall(r"^vllm:spec_decode_num_accepted_tokens_total\S* (\S+)$", metrics, re.MULTILINE)
    return sum(map(float, found))


async def ask(serve: Serve) -> list[list[int]]:
    async with grpc.aio.insecure_channel(serve.grpc_address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        return list(await asyncio.gather(*(over_grpc(stub, case, SERVED) for case in cases(4))))


@pytest.mark.process
async def test_target_and_draft_both_divided(serve: Serve, drafter: None, alone: Alone) -> None:
    expected = [alone.tokens(case.prompt, case.sampling, SERVED) for case in cases(4)]
    assert await ask(serve) == expected
    assert accepted(serve) > 0  # how many take part is up to the price of a step here


@pytest.mark.process
async def test_a_follower_that_stands_still_ends_its_verifier_which_comes_back(
    serve: Serve, alone: Alone
) -> None:
    """The follower stops in the middle of a step: every session of it is waiting for that follower."""
    serve.said.clear()
    expected = [alone.tokens(case.prompt, case.sampling, SERVED) for case in cases(4)]
    assert await ask(serve) == expected  # a first step would be given more time
    os.kill(serve.child("follower").pid, signal.SIGSTOP)
    answers = asyncio.create_task(ask(serve))
    await asyncio.to_thread(serve.wait_for, "a step takes much longer than it should")
    assert "exit code 1: outrider verifier: " in await asyncio.to_thread(serve.wait_for, "verifier died")
    try:
        found = await answers
    except grpc.aio.AioRpcError as lost:  # sessions wait a minute, in which a busy machine starts none
        assert "none came in its place" in str(lost.details())
        await asyncio.to_thread(serve.wait_for, "outrider verifier ready")
        found = await ask(serve)
    assert found == expected
