"""The same request and seed give the same tokens, whatever drafts, batches and dies around it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.engine.native import library
from outrider.options.engine import StepLimits
from outrider.sampling.params import SamplingParams
from outrider.wire.session import FinishReason
from tests.in_process import Answer, Cluster, Worker
from tests.tiny_models import build, near_copy

needs_compiler = pytest.mark.skipif(library() is None, reason="nothing can be compiled here")
MAX_TOKENS = 40
VOCAB = 199
PLAIN = SamplingParams(temperature=0.8, seed=1)
VARIANTS = [
    PLAIN,
    SamplingParams(temperature=1.0, top_p=0.9, seed=2),
    SamplingParams(temperature=1.3, top_k=20, min_p=0.02, seed=2**64 - 1),
    SamplingParams(
        temperature=0.7, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.2, seed=4
    ),
    SamplingParams(temperature=0.0, repetition_penalty=1.5),
    SamplingParams(temperature=0.9, logit_bias={3: 4.0, 7: -100.0}, seed=5),
]


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 50))]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = build("llama", folder / "target")
    return target, near_copy(target, folder / "draft")


async def ask_all(cluster: Cluster, k: int | None = None) -> list[Answer]:
    return [
        await cluster.ask(prompt(index), variant, MAX_TOKENS, k=k) for index, variant in enumerate(VARIANTS)
    ]


@pytest.fixture(scope="module")
def expected(pair: tuple[Path, Path]) -> list[list[int]]:
    """Each request alone, without a drafter."""

    async def run() -> list[list[int]]:
        async with Cluster(pair[0]) as cluster:
            return [answer.tokens for answer in await ask_all(cluster)]

    return asyncio.run(run())


@pytest.mark.parametrize("k", [1, 8])  # in the other tests it is the router's
async def test_with_a_drafter_at_any_k(pair: tuple[Path, Path], expected: list[list[int]], k: int) -> None:
    async with Cluster(pair[0], k=8) as cluster:
        await cluster.add_drafter(pair[1])
        answers = await ask_all(cluster, k)
    assert [answer.tokens for answer in answers] == expected
    assert sum(answer.accepted for answer in answers) > 0


@pytest.mark.parametrize("quantization", ["int8", pytest.param("int4", marks=needs_compiler)])
async def test_a_rounded_target_writes_the_same_alone_and_in_company(
    pair: tuple[Path, Path], quantization: str
) -> None:
    async with Cluster(pair[0], quantization=quantization) as cluster:
        alone = await ask_all(cluster)
        await cluster.add_drafter(pair[1])
        in_turn = await ask_all(cluster)
        together = await asyncio.gather(
            *(cluster.ask(prompt(index), variant, MAX_TOKENS) for index, variant in enumerate(VARIANTS))
        )
    for answers in (in_turn, together):
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in alone]
        assert sum(answer.accepted for answer in answers) > 0


async def test_a_draft_that_is_the_target_itself_is_always_right(
    pair: tuple[Path, Path], expected: list[list[int]]
) -> None:
    """Drafter and verifier draw with the same noise, transforms and history."""
    async with Cluster(pair[0]) as cluster:
        await cluster.add_drafter(pair[0])
        answers = await ask_all(cluster)
    assert [answer.tokens for answer in answers] == expected
    for answer in answers:
        assert answer.accepted == answer.verified > 0


async def test_switched_off_for_a_request(pair: tuple[Path, Path], expected: list[list[int]]) -> None:
    async with Cluster(pair[0]) as cluster:
        await cluster.add_drafter(pair[1])
        answers = await ask_all(cluster, 0)
    assert [answer.tokens for answer in answers] == expected
    assert sum(answer.verified for answer in answers) == 0


async def test_in_a_batch_of_sixteen(pair: tuple[Path, Path], expected: list[list[int]]) -> None:
    async with Cluster(pair[0]) as cluster:
        await cluster.add_drafter(pair[1])
        others = [
            cluster.ask(prompt(100 + i), replace(PLAIN, seed=i), MAX_TOKENS)
            for i in range(16 - len(VARIANTS))
        ]
        asked = [cluster.ask(prompt(i), variant, MAX_TOKENS) for i, variant in enumerate(VARIANTS)]
        answers = await asyncio.gather(*asked, *others)
    assert [answer.tokens for answer in answers[: len(VARIANTS)]] == expected


async def test_with_the_drafter_killed_half_way(pair: tuple[Path, Path], expected: list[list[int]]) -> None:
    async with Cluster(pair[0]) as cluster:
        drafter = await cluster.add_drafter(pair[1])
        killed = asyncio.Event()

        async def kill_half_way(tokens: list[int]) -> None:
            if len(tokens) >= MAX_TOKENS // 2 and not killed.is_set():
                killed.set()
                await drafter.kill()

        answers = await asyncio.gather(
            *(
                cluster.ask(prompt(i), variant, MAX_TOKENS, on_tokens=kill_half_way)
                for i, variant in enumerate(VARIANTS)
            )
        )
    assert killed.is_set()
    assert [answer.tokens for answer in answers] == expected


async def test_another_drafter_takes_over_from_prompt_and_output(pair: tuple[Path, Path]) -> None:
    async with Cluster(pair[0]) as cluster:
        alone = await cluster.ask(prompt(0), VARIANTS[0], 600)
        drafters = [await cluster.add_drafter(pair[1]), await cluster.add_drafter(pair[1])]
        killed: list[Worker] = []

        async def kill_the_one_that_drafts(tokens: list[int]) -> None:
            if len(tokens) >= 5 and not killed:
                killed.extend(drafter for drafter in drafters if drafter.stepper.load.sessions)
                await killed[0].kill()

        answer = await cluster.ask(prompt(0), VARIANTS[0], 600, on_tokens=kill_the_one_that_drafts)
        (other,) = [drafter for drafter in drafters if drafter not in killed]
        assert other.stepper.busy_seconds > 0
    assert answer.tokens == alone.tokens
    assert answer.accepted > 0


async def test_while_the_kv_pool_runs_out(pair: tuple[Path, Path], expected: list[list[int]]) -> None:
    """A pool that holds few of the sessions at once: some are preempted and computed again."""
    async with Cluster(
        pair[0], limits=StepLimits(max_batch_tokens=64, prefill_chunk=16), kv_blocks=12
    ) as cluster:
        await cluster.add_drafter(pair[1])
        answers = await asyncio.gather(
            *(cluster.ask(prompt(i), variant, MAX_TOKENS) for i, variant in enumerate(VARIANTS))
        )
        preemptions = cluster.verifier.stepper.load.preemptions
        pool = cluster.verifier.stepper._engine.pool
        pool.check_integrity()
        assert pool.usage == 0
    assert preemptions > 0
    assert [answer.tokens for answer in answers] == expected


async def test_a_shared_prefix_is_computed_once(pair: tuple[Path, Path]) -> None:
    long = prompt(1) * 8
    async with Cluster(pair[0]) as cluster:
        first = await cluster.ask(long, PLAIN, 8)
        second = await cluster.ask([*long, 5], PLAIN, 8)
        again = await cluster.ask(long, PLAIN, 8)
    assert first.cached_prompt_tokens == 0
    assert second.cached_prompt_tokens == len(long) // 16 * 16
    assert again.tokens == first.tokens
    assert again.cached_prompt_tokens >= (len(long) - 1) // 16 * 16


async def test_a_stop_token_ends_the_answer(pair: tuple[Path, Path]) -> None:
    async with Cluster(pair[0]) as cluster:
        await cluster.add_drafter(pair[1])
        eos = next(iter(cluster.sessions.model("").eos_token_ids))
        drawn = SamplingParams(temperature=1.0, logit_bias={eos: 6.0}, seed=11)
        answer = await cluster.ask(prompt(2), drawn, 150, ignore_eos=False)
        through = await cluster.ask(prompt(2), drawn, 150, ignore_eos=True)
    assert answer.reason is FinishReason.STOP
    assert answer.tokens[-1] == eos and answer.tokens.count(eos) == 1
    assert through.tokens[: len(answer.tokens)] == answer.tokens
    assert (len(through.tokens), through.reason) == (150, FinishReason.LENGTH)
