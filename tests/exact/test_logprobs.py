"""Log-probabilities: transformers' own, the same with drafts and without, and only where asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.sampling.logprobs import Scores
from outrider.v1 import verifier_pb2
from outrider.wire.verifier_sessions import EVENTS
from router.api import schema
from router.api.http import create_app
from router.api.intake import Intake
from router.api.validation import prepare
from router.metrics import Metrics
from tests.in_process import Cluster
from tests.tiny_models import build

PROMPT = [5, 17, 101, 3, 9, 44, 120, 77]
ASKED = {"prompt": PROMPT, "max_tokens": 24, "temperature": 1.5, "seed": 3, "logprobs": 4, "ignore_eos": True}
BIASED = {"logit_bias": {"7": 30}, "top_k": 5, "frequency_penalty": 1}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("target"))


def client_of(cluster: Cluster) -> httpx.AsyncClient:
    app = create_app(Intake(cluster.sessions, lambda below: 0), Metrics())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=120)


def streamed(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]


async def test_they_are_the_model_s_own_with_drafts_and_without(target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    async with Cluster(target) as cluster, client_of(cluster) as client:
        await cluster.add_drafter(target)
        for extra in ({}, BIASED):
            asked = ASKED | extra
            drafted = (await client.post("/v1/completions", json=asked)).json()
            plain = (await client.post("/v1/completions", json=asked | {"num_speculative_tokens": 0})).json()
            assert drafted["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
            assert drafted["choices"] == plain["choices"]
            request = asked | {"stream": True}
            chunks = streamed((await client.post("/v1/completions", json=request)).text)
            parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
            told = plain["choices"][0]["logprobs"]
            for name, values in told.items():
                assert [one for part in parts if part for one in part[name]] == values, name
            ids = await outputs(cluster, asked)
            with torch.no_grad():
                logits = model(torch.tensor([PROMPT + ids])).logits[0].double()
            expected = logits.log_softmax(-1)[len(PROMPT) - 1 : -1]
            own = expected.gather(1, torch.tensor(ids)[:, None])[:, 0]
            assert told["token_logprobs"] == pytest.approx(own.tolist(), abs=1e-3)
            best = expected.topk(4).values
            for top, values in zip(told["top_logprobs"], best, strict=True):
                assert sorted(top.values(), reverse=True)[:4] == pytest.approx(values.tolist(), abs=1e-3)


async def outputs(cluster: Cluster, asked: dict[str, Any]) -> list[int]:
    body = schema.parse(schema.CompletionRequest, asked)
    (session,) = prepare(body, cluster.sessions.model(""), lambda below: 0).sessions
    return (await cluster.ask(PROMPT, session.params.sampling, asked["max_tokens"])).tokens


async def test_who_asks_for_none_costs_nothing(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    sizes: list[bytes] = []
    find, to_bytes = Scores.find, EVENTS.to_bytes

    def finding(scores: Scores, *rest: Any) -> None:
        find(scores, *rest)
        found.append(len(scores.found))

    def sending(events: Any) -> bytes:
        sizes.append(to_bytes(events))
        return sizes[-1]

    monkeypatch.setattr(Scores, "find", finding)
    monkeypatch.setattr(EVENTS, "to_bytes", sending)
    async with Cluster(target) as cluster, client_of(cluster) as client:
        answer = await client.post("/v1/completions", json=ASKED | {"logprobs": None})
        assert answer.json()["choices"][0]["logprobs"] is None
        told = [verifier_pb2.VerifierEvents.FromString(raw) for raw in sizes]
        assert sum(len(step.tokens) for events in told for step in events.committed) == ASKED["max_tokens"]
        known = {"session_id", "base", "tokens", "accepted", "verified", "cached_prompt_tokens", "opening"}
        assert all({f.name for f, _ in s.ListFields()} <= known for events in told for s in events.committed)
        assert found == []
        await client.post("/v1/completions", json=ASKED)
        assert sum(found) == ASKED["max_tokens"]  # a row for each token


async def test_a_stream_that_is_resumed_has_them_from_its_log(target: Path) -> None:
    """It is cut off at every event."""
    async with Cluster(target) as cluster, client_of(cluster) as client:
        await cluster.add_drafter(target)
        fields = ASKED | {"stream": True}
        whole = (await client.post("/v1/completions", json=fields)).text.split("\n\n")
        ids = [block.split("\n")[0][4:] for block in whole if block.startswith("id: ")]
        for index, id in enumerate(ids):
            rest = (await client.post("/v1/completions", json=fields, headers={"Last-Event-ID": id})).text
            assert rest.split("\n\n") == whole[index + 1 :]
