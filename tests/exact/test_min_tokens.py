"""Texts that may not end yet: no token that would end them is drawn, by target and drafter alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from router.api import schema
from router.api.validation import prepare
from tests.in_process import Cluster
from tests.tiny_models import build

PROMPT = [5, 17, 101, 3, 9, 44, 120, 77]
LEAST, MOST = 20, 32


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("temperature", [0, 1.0])
async def test_it_ends_after_that_and_as_with_biases_before(target: Path, temperature: float) -> None:
    async with Cluster(target) as cluster:
        model = cluster.sessions.model("")

        async def ask(drafted: bool, **fields: Any) -> tuple[list[int], int, int]:
            body = {"prompt": PROMPT, "max_tokens": MOST, "ignore_eos": True, "seed": 3}
            parsed = schema.parse(schema.CompletionRequest, body | {"temperature": temperature} | fields)
            (session,) = prepare(parsed, model, lambda below: 0).sessions
            answer = await cluster.ask_for(replace(session, num_speculative_tokens=None if drafted else 0))
            return answer.tokens, answer.accepted, answer.verified

        await cluster.add_foreign_drafter(target, branches=False)  # so that what is verified is its path
        free = (await ask(False))[0]
        stops = sorted({*free[:LEAST]})
        assert (await ask(True, stop_token_ids=stops))[0] == free[:1]
        tokens, accepted, verified = await ask(True, stop_token_ids=stops, min_tokens=LEAST)
        biased = (await ask(False, logit_bias=dict.fromkeys(map(str, stops), -100)))[0]
        assert tokens[:LEAST] == biased[:LEAST]
        assert not set(tokens[:LEAST]) & set(stops) and not set(tokens[LEAST:-1]) & set(stops)
        assert accepted == verified > 0  # the drafter is the target: it drafts what the target draws
        assert (await ask(False, stop_token_ids=stops, min_tokens=LEAST))[0] == tokens
