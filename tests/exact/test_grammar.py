"""A text with a grammar obeys it to its end, and is the same with drafts, without, in company and after the
loss of its verifier."""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from outrider import grammar
from outrider.errors import InvalidRequest
from outrider.sampling.params import SamplingParams
from outrider.wire.session import FinishReason
from tests.goodness_of_fit import chi_square
from tests.in_process import Answer, Cluster
from tests.tiny_models import build, near_copy

SCHEMAS = int(os.environ.get("GRAMMAR_SCHEMAS", "20"))
PROMPT = [5, 9, 30, 31, 7]
MOST = 500
TEXTS = 512  # by which their distribution is judged
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
# Random models write white space without end where it is allowed.
DENSE = {"x-guidance": {"whitespace_flexible": False}}
VARIANTS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=2.0, seed=4),
    SamplingParams(temperature=1.0, top_p=0.5, top_k=9, min_p=0.01, seed=5),
    SamplingParams(temperature=1.0, presence_penalty=0.7, logit_bias={7: 20.0}, seed=6),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = build("llama", folder / "target", vocab_size=400)
    return target, near_copy(target, folder / "draft")


def of(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps({**DENSE, **schema}))


def text(target: Path, answer: Answer) -> str:
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    return tokenizer.decode(answer.tokens, skip_special_tokens=True)


async def ask(cluster: Cluster, variant: SamplingParams, k: int | None = None, **more: Any) -> Answer:
    return await cluster.ask(PROMPT, variant, MOST, k=k, grammar=of(PERSON), **more)


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Returns a schema of bounded texts."""
    kinds = ["string", "integer", "boolean", "null", "enum", "const", "pattern", "number", "anyOf"]
    kind = rng.choice([*kinds, *(["object", "array"] * 4 if depth < 3 else [])])
    match kind:
        case "string":
            return {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randrange(3, 9)}
        case "integer":
            low = rng.randrange(-99, 99)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1000)}
        case "number":
            return {"type": "string", "format": rng.choice(["date", "time", "ipv4", "uuid"])}
        case "enum":
            return {
                "enum": rng.sample(["a", "bc", "d e", 'f"g', "ü", 1, 2.5, None, True], rng.randrange(1, 5))
            }
        case "const":
            return {"const": rng.choice([{"a": [1, 2]}, "x\n", 0, False])}
        case "pattern":
            return {
                "type": "string",
                "pattern": rng.choice(["^[a-c]{2,4}$", "^(foo|ba+r)?$", "^\\d{3}-\\d$"]),
            }
        case "anyOf":
            return {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 4}]}
        case "object":
            names = rng.sample("abcdefgh", rng.randrange(1, 4))
            return {
                "type": "object",
                "properties": {name: schema(rng, depth + 1) for name in names},
                "required": [name for name in names if rng.random() < 0.7],
                "additionalProperties": False,
            }
        case "array":
            low = rng.randrange(3)
            return {
                "type": "array",
                "items": schema(rng, depth + 1),
                "minItems": low,
                "maxItems": low + rng.randrange(1, 3),
            }
    return {"type": kind}


async def test_the_same_text_with_drafts_and_without_and_in_company(pair: tuple[Path, Path]) -> None:
    async with Cluster(pair[0]) as cluster:
        plain = [await ask(cluster, variant) for variant in VARIANTS]
    for answer in plain:
        assert answer.reason is FinishReason.STOP
        jsonschema.validate(json.loads(text(pair[0], answer)), PERSON)
    async with Cluster(pair[0]) as cluster:
        await cluster.add_drafter(pair[1])
        drafted = [await ask(cluster, variant) for variant in VARIANTS]
        assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
        accepted, verified = (
            sum(getattr(each, name) for each in drafted) for name in ("accepted", "verified")
        )
        assert accepted > 0.5 * verified > 0
        free = cluster.ask(PROMPT, VARIANTS[1], 60)
        *company, other = await asyncio.gather(*(ask(cluster, variant) for variant in VARIANTS), free)
        assert [answer.tokens for answer in company] == [answer.tokens for answer in plain]
        assert other.tokens == (await cluster.ask(PROMPT, VARIANTS[1], 60)).tokens


async def test_hostile_drafts_change_nothing(pair: tuple[Path, Path]) -> None:
    async with Cluster(pair[0]) as cluster:
        plain = await ask(cluster, VARIANTS[1])
        await cluster.add_garbage_drafter(pair[1])
        assert (await ask(cluster, VARIANTS[1])).tokens == plain.tokens


async def test_a_text_goes_on_at_another_verifier(pair: tuple[Path, Path]) -> None:
    async with Cluster(pair[0]) as cluster:
        plain = await ask(cluster, VARIANTS[1])
        await cluster.add_drafter(pair[1])
        second = await cluster.add_verifier()
        killed = []

        async def lose(tokens: list[int]) -> None:
            if len(tokens) > 10 and not killed:
                killed.append(True)
                busy = cluster.verifier if cluster.verifier.stepper.load.running else second
                await busy.kill()

        assert (await ask(cluster, VARIANTS[1], on_tokens=lose)).tokens == plain.tokens
        assert killed


async def test_a_grammar_that_takes_too_much_is_told_with_what_to_change(pair: tuple[Path, Path]) -> None:
    hard = LLMatcher.grammar_from_regex("(a|b){1,1000}{1,1000}")
    hot, easy = SamplingParams(temperature=2.0, seed=2, logit_bias={0: -100.0}), VARIANTS[1]
    async with Cluster(pair[0]) as cluster:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=r"too many .*: bound its repetitions more tightly"):
                await cluster.ask(PROMPT, hot, MOST, grammar=hard)
        assert (await ask(cluster, easy)).reason is FinishReason.STOP


async def test_a_session_without_a_grammar_pays_nothing(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    for name in ("follow", "fits", "forced", "masks", "__init__"):
        was = getattr(grammar.Place, name)

        def told(*args: Any, name: str = name, was: Any = was, **kwargs: Any) -> Any:
            asked.append(name)
            return was(*args, **kwargs)

        monkeypatch.setattr(grammar.Place, name, told)
    async with Cluster(pair[0]) as cluster:
        await cluster.add_drafter(pair[1])
        await cluster.ask(PROMPT, VARIANTS[1], 30)
        assert not asked
        await ask(cluster, VARIANTS[1])
        assert {*asked} == {"follow", "fits", "forced", "masks", "__init__"}


@pytest.mark.timeout(3600)
async def test_every_text_that_ends_obeys_its_schema(pair: tuple[Path, Path]) -> None:
    rng, ended = random.Random(1), 0
    async with Cluster(pair[0]) as cluster:
        await cluster.add_drafter(pair[1])
        for number in range(SCHEMAS):
            asked = schema(rng)
            variants = [SamplingParams(temperature=heat, seed=number) for heat in (1.0, 2.0)]
            grammar = of(asked)
            answers = await asyncio.gather(
                *(cluster.ask(PROMPT, variant, MOST, grammar=grammar) for variant in variants)
            )
            for answer in answers:
                if answer.reason is FinishReason.STOP:
                    ended += 1
                    jsonschema.validate(json.loads(text(pair[0], answer)), asked, format_checker=FORMATS)
    print(f"{SCHEMAS} schemas at temperature 1 and 2: {ended} texts ended, all of them valid")
    assert ended > 0.9 * 2 * SCHEMAS


CHOICES = ["ab", "ac", "b", "bb", "cab", "cc"]


def chances(target: Path, temperature: float) -> list[float]:
    """How likely each of CHOICES is by the target, if at each position only what goes on with one of them, or
    ends one, may come; computed by transformers' own code, and without the grammar's library."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    end = model.config.eos_token_id

    def next_chances(prefix: str) -> dict[str, float]:
        after = {one[len(prefix) :][:1] for one in CHOICES if one.startswith(prefix)}  # "" = it ends
        ids = {one: tokenizer.token_to_id(one) if one else end for one in sorted(after)}
        given = PROMPT + [tokenizer.token_to_id(one) for one in prefix]
        with torch.no_grad():
            logits = model(torch.tensor([given])).logits[0, -1].double() / temperature
        return dict(zip(ids, logits[list(ids.values())].softmax(-1).tolist(), strict=True))

    found = []
    for choice in CHOICES:
        chance = 1.0
        for place in range(len(choice) + 1):
            chance *= next_chances(choice[:place])[choice[place : place + 1]]
        found.append(chance)
    assert sum(found) == pytest.approx(1)
    return found


async def test_texts_come_as_often_as_the_renormalised_target_says(pair: tuple[Path, Path]) -> None:
    temperature = 2.0
    grammar = LLMatcher.grammar_from_regex("|".join(CHOICES))
    expected, texts = chances(pair[0], temperature), []
    async with Cluster(pair[0]) as cluster:
        await cluster.add_drafter(pair[1])
        for first in range(0, TEXTS, 64):
            variants = [SamplingParams(temperature=temperature, seed=first + one) for one in range(64)]
            answers = await asyncio.gather(
                *(cluster.ask(PROMPT, variant, 9, grammar=grammar) for variant in variants)
            )
            texts += [text(pair[0], answer) for answer in answers]
    assert {*texts} <= {*CHOICES}
    counts = [texts.count(choice) for choice in CHOICES]
    kept = [index for index, chance in enumerate(expected) if chance * TEXTS >= 5]
    assert len(kept) >= 3
    of_rest = [1 - sum(expected[index] for index in kept)] if len(kept) < len(CHOICES) else []
    seen = [counts[index] for index in kept] + [TEXTS - sum(counts[index] for index in kept)] * len(of_rest)
    wanted = [expected[index] * TEXTS for index in kept] + [chance * TEXTS for chance in of_rest]
    assert chi_square(seen, wanted) > 1e-3, (seen, wanted)
