"""Where tokens came from: it adds up to the text and to the statistics, whole, streamed and resumed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.exact.test_logprobs import PROMPT, client_of, streamed
from tests.in_process import Cluster
from tests.tiny_models import build, near_copy

ASKED = {"prompt": PROMPT, "max_tokens": 48, "temperature": 1.0, "seed": 3, "ignore_eos": True}
ASKED |= {"return_speculation": True, "num_speculative_tokens": 4}
STREAMED = ASKED | {"stream": True, "stream_options": {"include_usage": True}}

Steps = list[dict[str, Any]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Often right, and sometimes wrong."""
    return near_copy(target, tmp_path_factory.mktemp("draft"))


def check(steps: Steps, answer: dict[str, Any], text: str, drafter: str) -> None:
    """The steps are an answer's text and its statistics."""
    tokens = [token for step in steps for token in step["tokens"]]
    assert b"".join(bytes(token["bytes"]) for token in tokens).decode("utf-8", "replace") == text
    assert len(tokens) == answer["usage"]["completion_tokens"]
    assert [step["step"] for step in steps] == list(range(len(steps)))
    figures = answer["metrics"]["speculative_decoding"]
    accepted = sum(step["accepted"] for step in steps)
    assert Counter(token["source"] for token in tokens)["accepted"] == accepted
    assert accepted == figures["num_accepted_draft_tokens"]
    assert sum(step["drafted"] for step in steps) == figures["num_draft_tokens"]
    assert sum(step["drafted"] > 0 for step in steps) == figures["num_spec_steps"]
    for step in steps:
        kept, sources = step["accepted"], [token["source"] for token in step["tokens"]]
        own = "plain" if not step["drafted"] else "bonus" if step["rejected"] is None else "correction"
        assert sources[:kept] == ["accepted"] * kept and sources[kept:] in ([], [own])
        assert own != "correction" or kept < step["drafted"]
        assert (step["rejected"] is not None) == (sources[-1] == "correction")
        guesses = [*step["tokens"][:kept], *filter(None, [step["rejected"]])]
        assert all(one["drafter"] == drafter and 0 <= one["probability"] <= 1 for one in guesses)
        assert all(one["drafter"] is one["probability"] is None for one in step["tokens"][kept:])


def told(chunks: list[dict[str, Any]]) -> Steps:
    found = [
        choice["speculation"]["steps"]
        for chunk in chunks
        for choice in chunk["choices"][:1]
        if "speculation" in choice
    ]
    return [step for steps in found for step in steps]


async def test_they_add_up_to_the_text_and_to_the_statistics(target: Path, draft: Path) -> None:
    async with Cluster(target) as cluster, client_of(cluster) as client:
        await cluster.add_drafter(draft)
        (drafter,) = cluster.fleet.drafters
        whole = (await client.post("/v1/completions", json=ASKED)).json()
        text, steps = whole["choices"][0]["text"], whole["choices"][0]["speculation"]["steps"]
        check(steps, whole, text, drafter)
        sources = {token["source"] for step in steps for token in step["tokens"]}
        assert "accepted" in sources and sources & {"bonus", "correction"}
        seconds = [step["seconds"] for step in steps]
        assert seconds == sorted(seconds) and seconds[0] > 0

        *chunks, last = streamed((await client.post("/v1/completions", json=STREAMED)).text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
        check(told(chunks), last, text, drafter)

        plain = (await client.post("/v1/completions", json=ASKED | {"num_speculative_tokens": 0})).json()
        assert plain["choices"][0]["text"] == text
        steps = plain["choices"][0]["speculation"]["steps"]
        check(steps, plain, text, drafter)
        assert all(step["drafted"] == 0 for step in steps)
        unasked = (await client.post("/v1/completions", json=ASKED | {"return_speculation": False})).json()
        assert "speculation" not in unasked["choices"][0]


async def test_a_stream_that_is_resumed_tells_the_same(target: Path, draft: Path) -> None:
    """It is cut off at every event; once more when only its log is left, which has no times."""
    async with Cluster(target) as cluster, client_of(cluster) as client:
        await cluster.add_drafter(draft)
        whole = (await client.post("/v1/completions", json=STREAMED)).text.split("\n\n")
        ids = [block.split("\n")[0][4:] for block in whole if block.startswith("id: ")]
        for index, id in enumerate(ids):
            rest = (await client.post("/v1/completions", json=STREAMED, headers={"Last-Event-ID": id})).text
            before, after = whole[index + 1 :], rest.split("\n\n")
            assert list(map(timeless, after)) == list(map(timeless, before))
        steps = told(
            streamed(rest_of(await client.get(f"/v1/sessions/{ids[0].split(':')[0]}/events?after=0")))
        )
        assert steps and all(step["seconds"] is None for step in steps)


def timeless(block: str) -> str:
    """An event without its times."""
    head, _, data = block.partition("data: ")
    if not data.startswith("{"):
        return block
    event = json.loads(data)
    for choice in event["choices"]:
        for step in choice.get("speculation", {"steps": []})["steps"]:
            step["seconds"] = None
    return head + json.dumps(event)


def rest_of(response: Any) -> str:
    return str(response.text)
