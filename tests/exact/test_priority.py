"""What gives way to others gives them its memory, and has its text all the same."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.sampling.params import SamplingParams
from outrider.wire.session import SessionParams
from router.requests import GenerationRequest
from tests.in_process import Cluster
from tests.tiny_models import build


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("target"))


def request(first: int, tokens: int, most: int, priority: int) -> GenerationRequest:
    prompt = tuple((first + 3 * index) % 120 + 3 for index in range(tokens))
    return GenerationRequest("", SessionParams(prompt, SamplingParams(seed=first), most, priority=priority))


async def test_a_person_s_request_goes_before_a_batch_s(target: Path) -> None:
    batch = [request(first, 40, 60, priority=100) for first in range(2)]
    person = request(7, 150, 20, priority=0)
    ended: list[str] = []
    async with Cluster(target, kv_blocks=16) as cluster:
        expected = [(await cluster.ask_for(one)).tokens for one in (*batch, person)]
        begun = [asyncio.Event() for _ in batch]

        async def work(index: int) -> list[int]:
            async def on_tokens(tokens: list[int]) -> None:
                begun[index].set()

            told = (await cluster.ask_for(replace(batch[index]), on_tokens)).tokens
            ended.append("batch")
            return told

        working = [asyncio.create_task(work(index)) for index in range(2)]
        await asyncio.gather(*(event.wait() for event in begun))
        assert not ended
        answer = (await cluster.ask_for(person)).tokens
        ended.append("person")
        told = await asyncio.gather(*working)
        assert [*told, answer] == expected
        assert cluster.verifier.stepper.load.preemptions > 0
    assert ended[0] == "person"
