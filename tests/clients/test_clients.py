"""Clients as their users install them get the text that the API gives: `make test-clients`."""

from __future__ import annotations

import json
import os

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo import pair
from tests.clients.conftest import Client

pytestmark = [
    pytest.mark.process,
    pytest.mark.clients,
    pytest.mark.timeout(1800),
    pytest.mark.skipif("CLIENTS" not in os.environ, reason="installs packages: make test-clients"),
]

PROMPT = "Once upon a time"
TOKENS = 24
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
CALL = {
    "tools": [{"type": "function", "function": {"name": "Weather", "parameters": SCHEMA}}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "temperature": 0,
}
FORMAT = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "Weather", "schema": SCHEMA}},
    "temperature": 0,
}
PACKAGES = ["openai", "anthropic", "langchain-openai", "litellm", "pydantic-ai-slim[openai]", "instructor"]
PACKAGES += ["llama-index-llms-openai-like", "llm"]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_client_gets_the_same_text(asked: Client, url: str, package: str) -> None:
    common = {"max_tokens": TOKENS, "temperature": 0}
    turns = [{"role": "user", "content": PROMPT}]
    with httpx.Client(base_url=f"{url}/v1", timeout=60, trust_env=False) as http:
        chat = http.post("/chat/completions", json={"messages": turns, **common}).json()
        called = http.post("/chat/completions", json={**CALL, "messages": turns}).json()["choices"][0]
        shaped = http.post("/chat/completions", json={**FORMAT, "messages": turns}).json()["choices"][0]
        completion = http.post("/completions", json={"prompt": PROMPT, **common}).json()
    expected = {
        "chat": chat["choices"][0]["message"]["content"],
        "completion": completion["choices"][0]["text"],
        "refused": {"openai": "model_not_found", "anthropic": "not_found_error"}.get(package),
        "call": json.loads(called["message"]["tool_calls"][0]["function"]["arguments"])["unit"],
        "ended": called["finish_reason"],
        "format": json.loads(shaped["message"]["content"])["unit"],
        "valid": True,
        "tokens": chat["usage"]["completion_tokens"],
        "prompt": chat["usage"]["prompt_tokens"],
        "reasons": {"length": "max_tokens", "stop": "end_turn"}[chat["choices"][0]["finish_reason"]],
    }
    told = asked(package, url, PROMPT)
    print(f"{package} {told.pop('version')}: {told}")
    assert told and len(expected["chat"]) > 1
    for what, values in told.items():
        assert values == [expected[what]] * len(values), what


def test_lm_eval_finds_transformers_likelihoods_and_a_chats_text(asked: Client, url: str) -> None:
    told = asked("lm-eval[api]", url, PROMPT)
    print(f"lm-eval {told['version']}: {len(told['docs'])} documents")
    model = AutoModelForCausalLM.from_pretrained(pair.TARGET, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(pair.TARGET)
    for index, doc in enumerate(told["docs"]):
        before = len(tokenizer(doc["context"], add_special_tokens=False).input_ids)
        expected = []
        for ending in doc["endings"]:
            ids = torch.tensor(tokenizer(doc["context"] + ending, add_special_tokens=False).input_ids)
            with torch.no_grad():
                of = model(ids[None]).logits[0].double().log_softmax(-1)
            expected.append(float(of[:-1].gather(1, ids[1:, None])[before - 1 :].sum()))
        for each in told["told"]:
            assert each[index] == pytest.approx(expected, abs=1e-3)
    with httpx.Client(base_url=f"{url}/v1", timeout=60, trust_env=False) as http:
        for doc, chat in zip(told["docs"], told["chats"], strict=True):
            turns = [{"role": "user", "content": doc["context"]}]
            asked_for = {"messages": turns, "max_tokens": 24, "temperature": 0, "stop": [".", "\n\n"]}
            (choice,) = http.post("/chat/completions", json=asked_for).json()["choices"]
            assert chat == choice["message"]["content"]


@pytest.mark.parametrize("package", ["guidellm", "aiperf"])
def test_a_benchmark_counts_what_the_service_counts(asked: Client, url: str, package: str) -> None:
    """Of each request that it made it tells the tokens that it read and that it was told."""
    told = asked(package, url, PROMPT)
    print(f"{package} {told.pop('version')}: {told}")
    assert told["failed"] == 0 and told["answered"] == told["asked"] > 0
    assert told["output"] == told["asked"] * TOKENS
