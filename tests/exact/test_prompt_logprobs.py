"""Log-probabilities of prompts: transformers' own, whatever is cached, however the prompt is read."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.options.engine import StepLimits
from outrider.sampling.logprobs import Scores
from router.api.http import create_app
from router.api.intake import Intake
from router.metrics import Metrics
from tests.in_process import Cluster
from tests.tiny_models import build
from verifier import step_plan

PROMPT = random.Random(7).choices(range(3, 120), k=75)
ECHO = {"prompt": PROMPT, "echo": True, "max_tokens": 0, "temperature": 0, "logprobs": 3}
TOLD = {"prompt": PROMPT, "prompt_logprobs": 2, "max_tokens": 12, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def expected(target: Path) -> torch.Tensor:
    """log p [len(PROMPT), V] of what follows each token of the prompt, as transformers has it."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0].double().log_softmax(-1)


def client_of(cluster: Cluster) -> httpx.AsyncClient:
    app = create_app(Intake(cluster.sessions, lambda below: 0), Metrics())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=120)


@pytest.fixture
async def client(target: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with Cluster(target) as cluster, client_of(cluster) as client:
        await cluster.add_drafter(target)
        yield client


async def asked(client: httpx.AsyncClient, fields: dict[str, Any]) -> dict[str, Any]:
    response = await client.post("/v1/completions", json=fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def check(entries: list[Any], expected: torch.Tensor, prompt: list[int] = PROMPT) -> None:
    assert entries[0] is None and len(entries) == len(prompt)
    for entry, token, of in zip(entries[1:], prompt[1:], expected, strict=False):
        own = entry[str(token)]
        assert own["logprob"] == pytest.approx(float(of[token]), abs=1e-3)
        assert own["rank"] == int((of > of[token]).sum()) + 1
        best = of.topk(2)
        for rank, (value, token_id) in enumerate(zip(*best, strict=True), start=1):
            told = entry[str(int(token_id))]
            assert (told["rank"], told["logprob"]) == (rank, pytest.approx(float(value), abs=1e-3))


async def test_a_text_that_repeats_its_prompt(client: httpx.AsyncClient, expected: torch.Tensor) -> None:
    """As lm-eval asks for it, and as OpenAI's old API told it; also if the prompt is cached."""
    own = [float(of[token]) for of, token in zip(expected, PROMPT[1:], strict=False)]
    await asked(client, {"prompt": PROMPT, "max_tokens": 2})
    for most in (0, 1, 5):
        answer = await asked(client, ECHO | {"max_tokens": most, "ignore_eos": True})
        told = answer["choices"][0]["logprobs"]
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
        assert len(told["tokens"]) == len(PROMPT) + most
        assert told["token_logprobs"][1 : len(PROMPT)] == pytest.approx(own, abs=1e-3)
        for top, of in zip(told["top_logprobs"][1 : len(PROMPT)], expected, strict=False):
            best = of.topk(3).values.tolist()
            assert sorted(top.values(), reverse=True)[:3] == pytest.approx(best, abs=1e-3)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        text = answer["choices"][0]["text"]
        if most == 0:
            prompt = text
            assert answer["choices"][0]["finish_reason"] == "length"
        assert text.startswith(prompt)
    without = await asked(client, {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "ignore_eos": True})
    assert text == prompt + without["choices"][0]["text"]


async def test_streamed_resumed_drafted_and_not(client: httpx.AsyncClient, expected: torch.Tensor) -> None:
    for fields in (TOLD, TOLD | {"echo": True, "logprobs": 1}):
        whole = await asked(client, fields)
        check(whole["choices"][0]["prompt_logprobs"], expected)
        plain = await asked(client, fields | {"num_speculative_tokens": 0})
        assert plain["choices"] == whole["choices"]
        assert whole["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
        stream = fields | {"stream": True}
        blocks = (await client.post("/v1/completions", json=stream)).text.split("\n\n")
        chunks = [json.loads(one.partition("data: ")[2])["choices"][0] for one in blocks if "{" in one]
        assert chunks[0]["prompt_logprobs"] == whole["choices"][0]["prompt_logprobs"]
        assert all("prompt_logprobs" not in chunk for chunk in chunks[1:])
        assert "".join(chunk["text"] for chunk in chunks) == whole["choices"][0]["text"]
        ids = [block.split("\n")[0][4:] for block in blocks if block.startswith("id: ")]
        for index, id in enumerate(ids):
            rest = await client.post("/v1/completions", json=stream, headers={"Last-Event-ID": id})
            assert rest.text.split("\n\n") == blocks[index + 1 :]
        again = await client.get(f"/v1/sessions/{ids[0].partition(':')[0]}/events")
        assert again.text.split("\n\n") == blocks


async def test_however_it_is_read(
    target: Path, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of 16 tokens at most, beside others, in a pool that is too small for all."""
    monkeypatch.setattr(step_plan, "SCORED_BYTES", 1)
    rows: list[int] = []
    read = Scores.read

    def reading(scores: Scores, logits: torch.Tensor) -> torch.Tensor:
        rows.append(sum(len(one.tokens) for one in scores.prompts))
        return read(scores, logits)

    monkeypatch.setattr(Scores, "read", reading)
    limits = StepLimits(max_batch_tokens=64, prefill_chunk=32)
    async with Cluster(target, limits=limits, kv_blocks=14) as cluster, client_of(cluster) as client:
        plain = {"prompt": PROMPT[:40], "max_tokens": 40, "ignore_eos": True}
        answers = await asyncio.gather(
            *(asked(client, TOLD | {"max_tokens": 40}) for _ in range(3)),
            *(asked(client, plain | {"seed": seed}) for seed in range(3)),
        )
        for answer in answers[:3]:
            check(answer["choices"][0]["prompt_logprobs"], expected)
        assert answers[0]["choices"] == answers[1]["choices"] == answers[2]["choices"]
        assert cluster.verifier.stepper.load.preemptions > 0
    assert 0 < max(rows) <= step_plan.LEAST_SCORED
    assert sum(rows) >= 3 * (len(PROMPT) - 1)


async def test_a_chat_has_them_beside_its_choices(client: httpx.AsyncClient) -> None:
    for length in (1, 2):
        answer = await asked(client, ECHO | {"prompt": PROMPT[:length], "prompt_logprobs": 0})
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == length
        assert len(answer["choices"][0]["prompt_logprobs"]) == length
