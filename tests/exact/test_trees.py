"""Drafts verified as a tree: whatever stands in it, the text is that without drafts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from llguidance import LLMatcher

from outrider.engine import replayed
from outrider.engine.engine import Engine
from outrider.engine.loading import load_engine, load_tokenizer
from outrider.engine.parts import Parts
from outrider.grammar import Grammars
from outrider.options.engine import StepLimits
from outrider.sampling.params import SamplingParams
from outrider.wire.logprobs import Logprobs
from outrider.wire.session import SessionParams
from tests import tiny_models
from tests.follower_pool import Pool, divided
from tests.tiny_models import build
from tests.zoo import verdict as zoo
from verifier.price import StepTime
from verifier.session import Outcome, SessionSpec
from verifier.step_start import Pace
from verifier.stepper import Running, Stepper, StepReport

VOCAB = 199
FREE = StepTime.measured({1: 0.04, 512: 0.04})  # tokens that cost nothing: all that is likely runs
LENGTHS = (
    1,
    5,
    15,
    16,
    17,
    31,
    40,
)  # around the block size, so that branches begin within and between blocks
MAX_TOKENS = 40
PARAMS = [
    {"sampling": SamplingParams(temperature=0.0)},
    {"sampling": SamplingParams(temperature=0.8, seed=1), "logprobs": 2, "guesses": True},
    {"sampling": SamplingParams(temperature=1.3, top_k=20, min_p=0.02, seed=2)},
    {"sampling": SamplingParams(temperature=0.7, presence_penalty=0.7, repetition_penalty=1.2, seed=4)},
    {"sampling": SamplingParams(temperature=0.0, repetition_penalty=1.5)},
    {
        "sampling": SamplingParams(temperature=1.0, seed=5),
        "grammar": LLMatcher.grammar_from_regex("[a-f0-9 ]{60}"),
    },
    {
        "sampling": SamplingParams(temperature=1.0, logit_bias={9: 6.0}, seed=6),
        "stop_token_ids": frozenset({9}),
    },
]


def specs() -> list[SessionSpec]:
    rng, found = random.Random(3), []
    for number, (length, more) in enumerate(zip(LENGTHS, PARAMS, strict=True)):
        prompt = tuple(rng.randrange(1, VOCAB) for _ in range(length))
        params = SessionParams(
            prompt, max_tokens=MAX_TOKENS, min_tokens=20 if "stop_token_ids" in more else 0, **more
        )
        found.append(SessionSpec(bytes([number]) * 16, params, (), VOCAB, b""))
    return found


def tree(rng: random.Random, coming: Sequence[int]) -> tuple[list[int], list[int], bytes]:
    """Returns a random tree of guesses in which the next tokens stand up to a random depth, or not at all."""
    tokens, parents, survival = list[int](), list[int](), list[int]()

    def add(token: int, parent: int) -> int:
        tokens.append(token)
        parents.append(parent)
        survival.append(rng.randrange(10, max(survival[parent] if parent >= 0 else 255, 11)))
        return len(tokens) - 1

    at = -1
    for token in coming[: rng.randrange(6)]:
        for _ in range(rng.randrange(3)):
            add(rng.randrange(1, VOCAB), at)
        at = add(token, at)
    for _ in range(rng.randrange(8)):
        add(rng.randrange(1, VOCAB), rng.randrange(-1, len(tokens)))
    return tokens, parents, bytes(survival)


@dataclass
class Found:
    running: list[Running]
    outcomes: list[Outcome]

    @property
    def texts(self) -> list[list[int]]:
        return [each.session.log[len(each.session.spec.params.prompt) :] for each in self.running]

    @property
    def logprobs(self) -> list[Logprobs]:
        return [each.logprobs.part(0, len(each.logprobs)) for each in self.running]

    @property
    def branched(self) -> int:
        """Returns how many steps took a branch: something that was not the first of the step's nodes."""
        ordinary = [tuple(range(len(each.followed))) for each in self.outcomes]
        return sum(each.followed != path for each, path in zip(self.outcomes, ordinary, strict=True))


async def run(
    engine: Engine,
    asked: Sequence[SessionSpec],
    tokenizer: str,
    expected: Sequence[Sequence[int]] | None = None,
    seed: int = 0,
    drafters: int = 1,
) -> Found:
    """All sessions to their end; with what is `expected` of them in random trees, if it is given. Of several
    drafters at a session the last dies in the middle."""
    rng, outcomes = random.Random(seed), list[Outcome]()
    whole = {each.session_id: text for each, text in zip(asked, expected or [[]] * len(asked), strict=True)}

    def on_step(report: StepReport) -> None:
        assert not report.failed
        for running, outcome in report.outcomes:
            outcomes.append(outcome)
            session = running.session
            if expected is not None and outcome.finish is None:
                coming = whole[running.id][session.output_length :]
                for seat in running.seats[:drafters]:
                    said = tree(rng, coming)
                    if said[0] and seat.pace is not None:
                        stepper.offer(seat, len(session.log), *said)
                if drafters > 1 and session.output_length > MAX_TOKENS // 2:
                    running.seats[drafters - 1].leave()

    grammars = Grammars(tokenizer, [0])
    stepper = Stepper(
        engine, StepLimits(), on_step, lambda: 0.0, lambda now, *_: now, FREE, grammars=grammars
    )
    opened = [stepper.open(each, 6) for each in asked]
    for running in opened:
        for number in range(drafters):
            running.seat(number).seated(Pace())
    steps = asyncio.create_task(stepper.run())
    async with asyncio.timeout(300):
        await stepper.until_empty()
    steps.cancel()
    await asyncio.gather(steps, return_exceptions=True)
    engine.pool.check_integrity([])
    return Found(opened, outcomes)


async def check(engine: Engine, expected: Found, tokenizer: str, seeds: Sequence[int]) -> int:
    """Returns how many steps took a branch."""
    branched = 0
    for seed in seeds:
        found = await run(engine, specs(), tokenizer, expected.texts, seed)
        assert found.texts == expected.texts
        if engine.info.bit_exact and not engine.divided:  # else sums may have another order
            assert found.logprobs == expected.logprobs
        for outcome in found.outcomes:
            assert not outcome.guesses or len(outcome.guesses) == outcome.verified
            right = [guess.token for guess in outcome.guesses[: outcome.accepted]]
            assert not outcome.guesses or right == list(outcome.tokens[: outcome.accepted])
        branched += found.branched
    return branched


@pytest.mark.parametrize(
    ("architecture", "attention"),
    [
        ("llama", "native"),
        ("llama", "gathered"),
        ("gemma3", "native"),
        ("lfm2", "native"),
        ("llama4_text", "native"),
    ],
)
async def test_any_tree_of_guesses_gives_the_text_of_no_drafts(
    architecture: str, attention: str, tmp_path: Path
) -> None:
    """Windows, chunks and short convolutions see what stands before a row on its own branch."""
    folder = tmp_path / "target"
    if architecture in tiny_models.ARCHITECTURES:
        build(architecture, folder)
    else:
        zoo.build(architecture, folder)
        tiny_models.save_tokenizer(folder)
    parts = Parts((attention, "gathered"), linears="packed")
    engine = load_engine(str(folder), threads=1, kv_memory_bytes=2**24, parts=parts)
    tokenizer = load_tokenizer(str(folder)).json
    expected = await run(engine, specs(), tokenizer)
    assert sum(len(set(text)) > 5 for text in expected.texts) > 4, "the texts vary"
    assert await check(engine, expected, tokenizer, range(4 if architecture == "llama" else 2)) > 20


@pytest.mark.parametrize("runner", ["calls", "called-again"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
async def test_a_kernel_that_reads_pages_gives_it_too(
    architecture: str, runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, with a kernel in plain torch: each branch is a sequence of its own."""
    monkeypatch.setattr(replayed, "SIZES", (8, 64, 128))  # of recorded steps
    folder = build(architecture, tmp_path / "target")
    parts = Parts(("reference",), runner, "packed")
    engine = load_engine(str(folder), threads=1, kv_memory_bytes=2**24, parts=parts)
    tokenizer = load_tokenizer(str(folder)).json
    expected = await run(engine, specs(), tokenizer)
    assert await check(engine, expected, tokenizer, range(3)) > 20


async def test_whatever_several_drafters_guess_the_text_is_that_without_them(tmp_path: Path) -> None:
    folder = build("llama", tmp_path / "target")
    engine = load_engine(str(folder), threads=1, kv_memory_bytes=2**24)
    tokenizer = load_tokenizer(str(folder)).json
    expected = await run(engine, specs(), tokenizer)
    found = await run(engine, specs(), tokenizer, expected.texts, 5, drafters=3)
    assert (found.texts, found.logprobs) == (expected.texts, expected.logprobs)
    assert found.branched > 5
    counts = [one for outcome in found.outcomes for one in outcome.drafters]
    assert sum(one.accepted for one in counts) > sum(outcome.accepted for outcome in found.outcomes) > 20
    assert all(one.alone <= one.verified and one.accepted <= one.verified for one in counts)


async def test_a_session_that_goes_on_elsewhere_and_a_pool_that_runs_out(tmp_path: Path) -> None:
    folder = build("llama", tmp_path / "target")
    engine = load_engine(str(folder), threads=1, kv_memory_bytes=2**24)
    tokenizer = load_tokenizer(str(folder)).json
    expected = (await run(engine, specs(), tokenizer)).texts
    halves = [
        replace(each, output=tuple(text[: len(text) // 2]))
        for each, text in zip(specs(), expected, strict=True)
    ]
    assert (await run(engine, halves, tokenizer, expected, 1)).texts == expected
    engine.pool = type(engine.pool)(14)  # some are preempted, and some branches find no room
    found = await run(engine, specs(), tokenizer, expected, 2)
    assert found.texts == expected and found.branched > 0


@pytest.mark.parametrize("parts", [None, Parts(("reference",), linears="packed")], ids=["gathered", "pages"])
async def test_ranks_run_the_same_tree(pool: Pool, tmp_path: Path, parts: Parts | None) -> None:
    folder = build("llama", tmp_path / "target")
    whole = load_engine(str(folder), threads=1, kv_memory_bytes=2**24)
    tokenizer = load_tokenizer(str(folder)).json
    expected = await run(whole, specs(), tokenizer)
    with divided(folder, 2, pool.start, parts) as engine:
        assert await check(engine, expected, tokenizer, [3]) > 5
