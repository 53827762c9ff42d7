"""Models with a recurrent state: whatever is drafted, shared or lost, the text is that without drafts."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest
import torch
from llguidance import LLMatcher
from transformers import AutoModelForCausalLM

from outrider.engine.engine import Engine
from outrider.engine.gathered_attention import GatheredAttention
from outrider.engine.kv_blocks import BlockPool
from outrider.engine.loading import load_engine, load_tokenizer
from outrider.errors import StartupError
from outrider.grammar import Grammars, Place
from outrider.options.engine import StepLimits
from outrider.sampling.params import SamplingParams
from outrider.v1 import generation_pb2_grpc
from outrider.wire.session import SessionParams
from tests.e2e.conftest import Alone, Eventually, start
from tests.e2e.test_serve import SAMPLINGS, Case, metric, over_grpc
from tests.exact.test_trees import run, specs
from tests.follower_pool import Pool, divided
from tests.tiny_models import build, near_copy
from tests.zoo.serving import own_text
from verifier.session import SessionSpec
from verifier.stepper import Stepper, StepReport

ONE = LLMatcher.grammar_from_regex("[a-f0-9]{60}")
LONG = 400  # tokens of an answer that outlives its verifier


def loaded(folder: Path) -> Grammars:
    return Grammars(load_tokenizer(str(folder)).json, [0])


def with_slots(engine: Engine, slots: int) -> None:
    attention = engine.attention
    assert isinstance(attention, GatheredAttention) and attention.states is not None
    attention.states = attention.states.resized(slots, attention.pools.num_blocks)
    engine.pool = BlockPool(engine.pool.num_blocks, engine.pool.block_size, attention.states.slots)


async def test_any_drafts_give_the_text_of_none(tmp_path: Path) -> None:
    """Greedy and sampled; in other steps, of half the text that another verifier committed, and with so few
    slots that most sessions wait for one."""
    folder = build("qwen3_next", tmp_path / "target")
    engine = load_engine(str(folder), threads=1, kv_memory_bytes=2**24)
    assert engine.info.bit_exact
    tokenizer = load_tokenizer(str(folder)).json
    expected = await run(engine, specs(), tokenizer)
    assert sum(len(set(text)) > 5 for text in expected.texts) > 4, "the texts vary"
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    greedy = expected.running[0].session.spec.params.prompt, expected.texts[0]
    assert greedy[1] == own_text(own, greedy[0])[: len(greedy[1])]
    for seed in range(2):
        found = await run(engine, specs(), tokenizer, expected.texts, seed)
        assert found.texts == expected.texts and found.logprobs == expected.logprobs
        assert sum(outcome.accepted for outcome in found.outcomes) > 20 and found.branched == 0
    halves = [
        replace(each, output=tuple(text[: len(text) // 2]))
        for each, text in zip(specs(), expected.texts, strict=True)
    ]
    with_slots(engine, 4)
    assert (await run(engine, halves, tokenizer, expected.texts, 2)).texts == expected.texts


async def test_who_is_held_up_by_a_grammar_keeps_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others had it meanwhile: a step had more sessions than there are slots for states, and the verifier
    ended."""
    folder = build("qwen3_next", tmp_path / "target")
    engine, grammars = load_engine(str(folder), threads=1, kv_memory_bytes=2**24), loaded(folder)
    with_slots(engine, 6)
    steps, most = 0, 0

    def on_step(report: StepReport) -> None:
        nonlocal steps, most
        steps, most = steps + 1, max(most, sum(bool(each.table.blocks) for each in opened))

    monkeypatch.setattr(Place, "ready", property(lambda _: steps % 2 == 0))
    stepper = Stepper(engine, StepLimits(), on_step, lambda: 0.0, lambda now, *_: now, grammars=grammars)
    opened = [
        stepper.open(SessionSpec(bytes([number]) * 16, params, (), 199, b""), 0)
        for number in range(9)
        for params in [SessionParams((5, 6), SamplingParams(0.0), 40, grammar=ONE * (number < 2))]
    ]
    running, empty = asyncio.create_task(stepper.run()), asyncio.create_task(stepper.until_empty())
    await asyncio.wait((running, empty), timeout=60, return_when=asyncio.FIRST_COMPLETED)
    assert empty.done() and not running.done() and most == 3
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_divided_model_gives_the_text_of_the_whole_one(pool: Pool, tmp_path: Path) -> None:
    """Followers are told what to do with which state: they do not know which blocks were given up."""
    folder = build("qwen3_next", tmp_path / "target")
    tokenizer = load_tokenizer(str(folder)).json
    whole = load_engine(str(folder), threads=1, kv_memory_bytes=2**24)
    expected = await run(whole, specs(), tokenizer)
    with divided(folder, 2, pool.start) as engine:
        assert engine.info.bit_exact and engine.attention.states is not None
        found = await run(engine, specs(), tokenizer, expected.texts)
    assert found.texts == expected.texts
    assert sum(outcome.accepted for outcome in found.outcomes) > 20


@pytest.mark.process
async def test_a_divided_model_goes_on_after_its_verifier_has_died(
    tmp_path: Path, eventually: Eventually
) -> None:
    """Of two divided verifiers one is killed while every stream runs; states are not handed on, but computed
    again, on both processes of the other."""
    folder = build("qwen3_next", tmp_path / "target")
    draft = near_copy(folder, tmp_path / "draft")
    asked = [Case(tuple(range(7 + i, 60 + 9 * i)), SAMPLINGS[i % 4]) for i in range(6)]
    alone = Alone(folder)
    expected = [alone.tokens(case.prompt, case.sampling, LONG) for case in asked]
    serve = start(
        *("--target", str(folder), "--draft", str(draft), "--tensor-parallel-size", "2"),
        *("--verifiers", "2", "--no-compare", "--log-level", "info"),
    )
    try:
        async with grpc.aio.insecure_channel(serve.grpc_address) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            streams = [asyncio.create_task(over_grpc(stub, case, LONG)) for case in asked]
            await asyncio.to_thread(
                eventually, lambda: metric(serve, "vllm:generation_tokens_total") >= LONG, "they run"
            )
            serve.child("verifier").kill()
            assert await asyncio.gather(*streams) == expected
        said = re.findall(r"no verifier after (\d+) tokens", "".join(serve.said))
        assert any(0 < int(tokens) < LONG for tokens in said), said
    finally:
        serve.end()


def test_too_little_memory_for_states_is_said_so(tmp_path: Path) -> None:
    folder = str(build("qwen3_next", tmp_path / "target"))
    with pytest.raises(StartupError, match=r"holds \d of the recurrent states .* give at least \d+KiB"):
        load_engine(folder, threads=1, kv_memory_bytes=2**18)
