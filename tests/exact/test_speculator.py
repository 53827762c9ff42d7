"""A target with a speculator writes the text that it writes without: whatever it guesses, and whoever does
beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llguidance import LLMatcher

from outrider.engine.native import library
from outrider.engine.speculator import Shape, Speculator, save
from outrider.sampling.params import SamplingParams
from tests.in_process import Cluster
from tests.tiny_models import build

needs_compiler = pytest.mark.skipif(library() is None, reason="nothing can be compiled here")
OUTPUT, WORDS = 60, (20, 30, 40)
LIKED = {WORDS[0]: 100.0}  # logit bias: all of the text, and so all that is guessed


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(request.param, tmp_path_factory.mktemp("speculator") / "target")


@pytest.fixture(scope="module")
def speculator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that guesses at random."""
    folder = tmp_path_factory.mktemp("speculator") / "made"
    torch.manual_seed(0)
    save(Speculator(Shape(64, 96, 150)), range(150), folder)
    return folder


@pytest.mark.parametrize("quantization", [None, "int8", pytest.param("int4", marks=needs_compiler)])
async def test_the_text_is_that_of_no_guesses(
    target: Path, speculator: Path, quantization: str | None
) -> None:
    asked = [
        (SamplingParams(temperature=0.0), 0),
        (SamplingParams(temperature=0.8, seed=3), 0),
        (SamplingParams(temperature=0.9, seed=4, repetition_penalty=1.2), 0),
        (SamplingParams(temperature=0.0, logit_bias=LIKED), OUTPUT // 2),
        (SamplingParams(temperature=1.0, seed=5, logit_bias=LIKED), OUTPUT // 2),
    ]
    prompt = list(range(10, 40))
    async with Cluster(target, quantization=quantization) as cluster:
        plain = [await cluster.ask(prompt, sampling, OUTPUT) for sampling, _ in asked]
    async with Cluster(target, quantization=quantization, speculator=speculator) as cluster:
        guessed = [await cluster.ask(prompt, sampling, OUTPUT) for sampling, _ in asked]
        await cluster.add_drafter(target)
        beside = [await cluster.ask(prompt, sampling, OUTPUT) for sampling, _ in asked]
    assert [each.tokens for each in guessed] == [each.tokens for each in plain]
    assert [each.tokens for each in beside] == [each.tokens for each in plain]
    for each in (beside[0], beside[3]):  # what the drafter said is told apart from what the speculator did
        assert each.accepted >= each.accepted_of[target.name] > 0
    for (_, least), each in zip(asked, guessed, strict=True):
        assert each.accepted == each.own.speculated_accepted >= least
        assert each.verified == each.own.speculated
    assert guessed[2].own.speculated == 0, "whose penalties follow each token has no guesses"


async def test_what_a_grammar_allows_of_its_guesses_is_verified(target: Path, speculator: Path) -> None:
    grammar, prompt = LLMatcher.grammar_from_regex("[0-9]{90}"), list(range(10, 40))
    asked = [SamplingParams(temperature=0.0, logit_bias=LIKED), SamplingParams(temperature=0.9, seed=6)]
    async with Cluster(target) as cluster:
        plain = [await cluster.ask(prompt, sampling, OUTPUT, grammar=grammar) for sampling in asked]
    async with Cluster(target, speculator=speculator) as cluster:
        guessed = [await cluster.ask(prompt, sampling, OUTPUT, grammar=grammar) for sampling in asked]
    assert [each.tokens for each in guessed] == [each.tokens for each in plain]
    assert guessed[0].own.speculated_accepted > OUTPUT // 3 and guessed[1].own.speculated > 0
