"""A draft model with another tokenizer: texts stay the target's own, and its guesses are worth something."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from demo import pair
from drafter import draft_model
from drafter.retokenized import Retokenizing
from drafter.stepper import DraftStepper
from outrider.sampling.params import SamplingParams
from tests.in_process import Answer, Cluster
from tests.tiny_models import build, near_copy, with_other_tokens

GREEDY = SamplingParams(temperature=0.0)
VARIANTS = [
    GREEDY,
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=1.0, top_p=0.9, frequency_penalty=0.4, repetition_penalty=1.2, seed=2),
    SamplingParams(temperature=0.9, logit_bias={40: 4.0, 70: -100.0}, seed=3),
]
SCHEMA = LLMatcher.grammar_from_json_schema(
    json.dumps(
        {
            "x-guidance": {"whitespace_flexible": False},
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [1, 22, 333]}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
    )
)
TEXT = "def total(items):\n    return sum(item.price for item in items)\n\n\ndef count(items):\n"


async def ask_all(cluster: Cluster, prompts: list[list[int]], tokens: int) -> list[Answer]:
    answers = [await cluster.ask(prompt, variant, tokens) for variant in VARIANTS for prompt in prompts]
    return [*answers, await cluster.ask(prompts[0], VARIANTS[1], 200, grammar=SCHEMA)]


def tokens_of(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def taken(answers: list[Answer]) -> float:
    return sum(one.accepted for one in answers) / sum(one.verified for one in answers)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a good draft for it that has its own tokens."""
    folder = tmp_path_factory.mktemp("pair")
    target = build("llama", folder / "target", vocab_size=330)
    return target, near_copy(target, folder / "draft")


async def test_tokens_that_both_have_are_drafted_with_the_targets_noise(
    tiny: tuple[Path, Path], tmp_path: Path
) -> None:
    """Renumbered, and with tokens of its own: it guesses as if it had the target's."""
    target, draft = tiny
    prompts = [[5, 9, 30, 31, 7, 300]]
    other = with_other_tokens(draft, tmp_path / "other", more=20, end="</s>")
    async with Cluster(target) as cluster:
        alone = await ask_all(cluster, prompts, 24)
        drafter = await cluster.add_drafter(draft)
        usual = await ask_all(cluster, prompts, 24)
        await drafter.kill()
        foreign = await cluster.add_foreign_drafter(other)
        assert isinstance(foreign.stepper, DraftStepper)
        answers = await ask_all(cluster, prompts, 24)
        together = await asyncio.gather(
            *(cluster.ask(prompts[0], replace(VARIANTS[1], seed=seed), 24) for seed in (1, 2, 3))
        )
    assert tokens_of(answers) == tokens_of(usual) == tokens_of(alone)
    assert together[0].tokens == alone[len(prompts)].tokens
    assert taken(answers) > 0.9 * taken(usual) > 0.5


@pytest.mark.parametrize("fewer", [200, 2400])
async def test_of_a_text_that_it_divides_in_other_ways_enough_is_taken(fewer: int, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(pair.TARGET / "tokenizer.json"))
    prompts = [tokenizer.encode(TEXT).ids]
    other = with_other_tokens(pair.DRAFT, tmp_path / "other", fewer=fewer)
    async with Cluster(pair.TARGET) as cluster:
        alone = await ask_all(cluster, prompts, 32)
        drafter = await cluster.add_foreign_drafter(other)
        assert isinstance(drafter.stepper, Retokenizing if fewer > 1000 else DraftStepper)
        answers = await ask_all(cluster, prompts, 32)
    assert tokens_of(answers) == tokens_of(alone)
    assert taken(answers) > 0.25
    assert sum(one.steps for one in answers) < 0.9 * sum(one.steps for one in alone)


async def test_a_tokenizer_that_lies_changes_nothing_but_what_is_taken(
    tiny: tuple[Path, Path], tmp_path: Path
) -> None:
    """The ids in its file are not those that the model was made with."""
    target, draft = tiny
    liar = with_other_tokens(draft, tmp_path / "liar", more=20)
    content = json.loads((liar / "tokenizer.json").read_text())
    names = sorted(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    special = content["added_tokens"][0]["content"]
    names.remove(special)
    names.reverse()
    names.insert(content["added_tokens"][0]["id"], special)
    content["model"]["vocab"] = {name: id for id, name in enumerate(names)}
    (liar / "tokenizer.json").write_text(json.dumps(content))
    async with Cluster(target) as cluster:
        alone = await ask_all(cluster, [[5, 9, 30]], 30)
        await cluster.add_foreign_drafter(liar)
        answers = await ask_all(cluster, [[5, 9, 30]], 30)
    assert tokens_of(answers) == tokens_of(alone)


async def test_a_text_longer_than_the_model_can_read_goes_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "LEAST_COMMON", 1.1)
    target = build("llama", tmp_path / "target", vocab_size=330)
    draft = with_other_tokens(near_copy(target, tmp_path / "near"), tmp_path / "draft", fewer=50)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 100}))
    prompt = [281 + index % 49 for index in range(60)]  # letters in pairs: more tokens of the draft's
    async with Cluster(target) as cluster:
        alone = await cluster.ask(prompt, GREEDY, 34)
        drafter = await cluster.add_foreign_drafter(draft)
        answer = await cluster.ask(prompt, GREEDY, 34)
        assert answer.tokens == alone.tokens
        assert drafter.stepper.load.sessions == 0
