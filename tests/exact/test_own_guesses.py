"""A text is the same with the verifier's own guesses: a prediction, right or wrong, and forced tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from outrider.sampling.params import SamplingParams
from outrider.wire.session import SessionParams
from router.requests import GenerationRequest
from tests.in_process import Answer, Cluster
from tests.tiny_models import build, near_copy
from verifier.ways import Ways

PROMPT = (5, 9, 30, 31, 7)
MOST = 60
K = 8
VARIANTS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=0.8, presence_penalty=0.7, repetition_penalty=1.2, seed=4),
]
NAMES = ["temperature", "precipitation", "direction"]
SCHEMA = {
    "type": "object",
    "properties": {name: {"enum": ["unavailable", "measured", "estimated"]} for name in NAMES},
    "required": NAMES,
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMAR = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))
SPACED = LLMatcher.grammar_from_json_schema(
    json.dumps({**SCHEMA, "x-guidance": {"whitespace_pattern": "[ ]{1,2}"}})
)
SEVERAL = {"type": "array", "items": SCHEMA, "minItems": 4, "x-guidance": SCHEMA["x-guidance"]}
LONG = LLMatcher.grammar_from_json_schema(json.dumps(SEVERAL))
LONG_TOKENS = 200


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = build("llama", folder / "target", vocab_size=400)
    return target, near_copy(target, folder / "draft")


async def ask(
    cluster: Cluster,
    sampling: SamplingParams,
    prediction: Sequence[int] = (),
    grammar: str = "",
    k: int = K,
    salt: bytes = b"",
    on_tokens: Any = None,
) -> Answer:
    stop = tuple(cluster.sessions.model("").eos_token_ids) if grammar else ()
    most = LONG_TOKENS if grammar else MOST
    params = SessionParams(PROMPT, sampling, most, stop, salt, grammar=grammar, prediction=tuple(prediction))
    return await cluster.ask_for(GenerationRequest("", params, k), on_tokens)


def edited(text: Sequence[int]) -> list[int]:
    """Returns a prediction that is right but for a token in the middle, and some that are missing."""
    return [*text[:20], 7, *text[21:30], *text[33:]]


def wrong(text: Sequence[int]) -> list[int]:
    return [(token + 1) % 400 for token in text]


async def test_a_prediction_changes_no_text_whatever_it_says(pair: tuple[Path, Path]) -> None:
    async with Cluster(pair[0], k=K) as cluster:
        plain = [await ask(cluster, variant, k=0) for variant in VARIANTS]
        for drafted in (False, True):
            if drafted:
                await cluster.add_drafter(pair[1])
            for variant, answer in zip(VARIANTS, plain, strict=True):
                exact = await ask(cluster, variant, answer.tokens)
                assert exact.tokens == answer.tokens
                assert exact.own.predicted_accepted == exact.own.predicted > (20 if drafted else 40)
                changed = await ask(cluster, variant, edited(answer.tokens))
                assert changed.tokens == answer.tokens
                assert changed.own.predicted_accepted > 20
                never = await ask(cluster, variant, wrong(answer.tokens))
                assert never.tokens == answer.tokens
                if not drafted:
                    assert changed.own.predicted > changed.own.predicted_accepted
                    assert exact.steps < MOST / 5 and changed.steps < MOST / 3
                    assert never.verified < 20  # rows that brought nothing
        together = await asyncio.gather(*(ask(cluster, one, plain[0].tokens) for one in VARIANTS))
        assert [answer.tokens for answer in together] == [answer.tokens for answer in plain]
        off = await ask(cluster, VARIANTS[0], plain[0].tokens, k=0)
        assert (off.tokens, off.verified) == (plain[0].tokens, 0)


@pytest.mark.parametrize("grammar", [GRAMMAR, SPACED])
async def test_forced_and_likely_tokens_change_no_text(pair: tuple[Path, Path], grammar: str) -> None:
    async with Cluster(pair[0], k=K) as cluster:
        plain = [await ask(cluster, variant, grammar=grammar, k=0) for variant in VARIANTS]
        for drafted in (False, True):
            if drafted:
                await cluster.add_drafter(pair[1])
            for variant, answer in zip(VARIANTS, plain, strict=True):
                forced = await ask(cluster, variant, grammar=grammar)
                assert forced.tokens == answer.tokens
                assert forced.own.forced > 0
                both = await ask(cluster, variant, edited(answer.tokens), grammar)
                assert both.tokens == answer.tokens
                assert both.own.forced > 0 < both.own.predicted


async def test_while_drafts_rest_forced_tokens_and_predictions_save_their_steps(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Cluster(pair[0], k=K) as cluster:
        await cluster.add_drafter(pair[1])
        plain = [await ask(cluster, variant, grammar=LONG, k=0) for variant in VARIANTS]
        monkeypatch.setattr(Ways, "resting", property(lambda _: True))
        for variant, answer in zip(VARIANTS, plain, strict=True):
            assert answer.steps == len(answer.tokens) == LONG_TOKENS
            forced = await ask(cluster, variant, grammar=LONG)
            assert forced.tokens == answer.tokens
            assert 1.3 * forced.steps < answer.steps
            assert (forced.own.forced, forced.own.forced_accepted) == (forced.verified, forced.accepted)
            both = await ask(cluster, variant, edited(answer.tokens), LONG)
            assert both.tokens == answer.tokens
            assert both.steps < forced.steps and both.own.predicted_accepted > 0


async def test_a_prediction_goes_on_at_another_verifier(pair: tuple[Path, Path]) -> None:
    async with Cluster(pair[0], k=K) as cluster:
        plain = await ask(cluster, VARIANTS[1], k=0)
        second = await cluster.add_verifier()
        lost: list[int] = []

        async def lose(tokens: list[int]) -> None:
            if len(tokens) > 20 and not lost:
                lost.append(len(tokens))
                busy = cluster.verifier if cluster.verifier.stepper.load.running else second
                await busy.kill()

        answer = await ask(cluster, VARIANTS[1], plain.tokens, on_tokens=lose)
        assert answer.tokens == plain.tokens
        assert lost and answer.own.predicted_accepted > 40


async def test_looked_up_drafts_change_no_text(pair: tuple[Path, Path]) -> None:
    few = SamplingParams(
        temperature=1.0, logit_bias={7: 30.0, 8: 30.0, 9: 30.0}, seed=3
    )  # a text of few tokens
    async with Cluster(pair[0], k=K, patience_seconds=0.05) as cluster:
        plain = [await ask(cluster, variant, k=0) for variant in (few, *VARIANTS)]
        await cluster.add_looking_up(2**20)
        drafted = [await ask(cluster, variant) for variant in (few, *VARIANTS, few)]
        assert [answer.tokens for answer in drafted] == [answer.tokens for answer in (*plain, plain[0])]
        assert drafted[0].verified > drafted[0].accepted > 0
        predicted = await ask(cluster, few, edited(plain[0].tokens))
        assert predicted.tokens == plain[0].tokens
