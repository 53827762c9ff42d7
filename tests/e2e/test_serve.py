"""Real processes under real load: every answer is the target's own, whatever happens to the drafter."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import grpc.aio
import httpx
import openai
import pytest
from tokenizers import Tokenizer

from demo.heldout import heldout_prompts
from outrider.sampling.params import SamplingParams
from outrider.v1 import generation_pb2, generation_pb2_grpc
from router.banner import curl_line, python_line
from tests.e2e.conftest import TARGET, Alone, Eventually, Serve
from tests.plain_http import HTTP

pytestmark = pytest.mark.process

MAX_TOKENS = 40
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.95, seed=3),
    SamplingParams(temperature=1.0, top_k=50, seed=4),
    SamplingParams(temperature=0.6, repetition_penalty=1.1, presence_penalty=0.5, seed=5),
]


@dataclass(frozen=True)
class Case:
    prompt: tuple[int, ...]
    sampling: SamplingParams


def cases(count: int) -> list[Case]:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    prompts = [tuple(tokenizer.encode(text).ids) for text in heldout_prompts(12)]
    return [Case(prompts[i % len(prompts)], SAMPLINGS[i % len(SAMPLINGS)]) for i in range(count)]


def fields(sampling: SamplingParams) -> dict[str, object]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "presence_penalty": sampling.presence_penalty,
    }


def extra(sampling: SamplingParams) -> dict[str, object]:
    """What the openai client passes on as it is."""
    return {"top_k": sampling.top_k, "repetition_penalty": sampling.repetition_penalty, "ignore_eos": True}


async def over_http(client: openai.AsyncOpenAI, case: Case, max_tokens: int = MAX_TOKENS) -> str:
    stream = await client.completions.create(
        model="outrider-demo",
        prompt=list(case.prompt),
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=extra(case.sampling),
        **fields(case.sampling),  # type: ignore[arg-type]
    )
    text, last = "", None
    async for chunk in stream:
        text += "".join(choice.text for choice in chunk.choices)
        last = chunk
    assert last is not None and last.usage is not None and last.usage.completion_tokens == max_tokens
    check_statistics(last.model_extra["metrics"]["speculative_decoding"])  # type: ignore[index]
    return text


def check_statistics(told: dict[str, object]) -> None:
    """vLLM's object: the integers reconcile."""
    histogram = told["acceptance_histogram"]
    assert isinstance(histogram, list)
    assert sum(histogram) == told["num_spec_steps"]
    assert sum(i * n for i, n in enumerate(histogram)) == told["num_accepted_draft_tokens"]
    assert told["num_accepted_draft_tokens"] <= told["num_draft_tokens"]  # type: ignore[operator]


async def over_grpc(
    stub: generation_pb2_grpc.GenerationStub, case: Case, max_tokens: int = MAX_TOKENS
) -> list[int]:
    s = case.sampling
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=case.prompt),
        max_tokens=max_tokens,
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        seed=s.seed,
        presence_penalty=s.presence_penalty,
        repetition_penalty=s.repetition_penalty,
        ignore_eos=True,
    )
    tokens: list[int] = []
    async for response in stub.Generate(request):
        tokens += response.delta.token_ids
    return tokens


async def ask_all(
    serve: Serve, http_cases: list[Case], grpc_cases: list[Case]
) -> tuple[list[str], list[list[int]]]:
    limits = httpx.Limits(max_connections=64)
    async with (
        openai.AsyncOpenAI(
            base_url=serve.url + "/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx.AsyncClient(limits=limits, trust_env=False, timeout=240),
        ) as client,
        grpc.aio.insecure_channel(serve.grpc_address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationStub(channel)
        answers = await asyncio.gather(
            *(over_http(client, case) for case in http_cases), *(over_grpc(stub, case) for case in grpc_cases)
        )
    return answers[: len(http_cases)], answers[len(http_cases) :]  # type: ignore[return-value]


def check(alone: Alone, http: list[tuple[Case, str]], grpc_: list[tuple[Case, list[int]]]) -> None:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    for case, text in http:
        tokens = alone.tokens(case.prompt, case.sampling, MAX_TOKENS)
        assert text == tokenizer.decode(tokens, skip_special_tokens=True)
    for case, tokens in grpc_:
        assert tokens == alone.tokens(case.prompt, case.sampling, MAX_TOKENS)


def metric(serve: Serve, name: str) -> float:
    """The sum of a metric's samples."""
    text = HTTP.get(serve.url + "/metrics").text
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.split("{")[0].split(" ")[0] == name
    )


async def test_forty_streams_at_once_each_give_the_targets_own_text(serve: Serve, alone: Alone) -> None:
    http_cases, grpc_cases = cases(32), cases(8)
    texts, tokens = await ask_all(serve, http_cases, grpc_cases)
    check(
        alone,
        list(zip(http_cases, texts, strict=True)),
        list(zip(grpc_cases, tokens, strict=True)),
    )
    await drafts_are_taken(serve, 0)


async def drafts_are_taken(serve: Serve, before: float) -> None:
    """More of them than `before`. Those that come late or are not worth their price take no part. If all of
    its first came late, as on a busy machine, a drafter has the next session after 1,024 steps, on trial."""
    for _ in range(80):
        if metric(serve, "vllm:spec_decode_num_accepted_tokens_total") > before:
            return
        await ask_all(serve, cases(1), [])
    assert metric(serve, "vllm:spec_decode_num_accepted_tokens_total") > before


def drafter_joined(serve: Serve) -> bool:
    text = HTTP.get(serve.url + "/metrics").text
    return 'outrider_workers{role="drafter"} 1.0' in text


async def test_a_new_drafter_is_started_and_used(serve: Serve, eventually: Eventually) -> None:
    """One of a draft model. That its end changes no text is tests/e2e/test_suffix.py's."""
    await asyncio.to_thread(eventually, lambda: drafter_joined(serve), "a drafter joins")
    serve.child("drafter").kill()
    await asyncio.to_thread(eventually, lambda: not drafter_joined(serve), "the dead drafter leaves")
    await asyncio.to_thread(eventually, lambda: drafter_joined(serve), "a new drafter joins")
    await drafts_are_taken(serve, metric(serve, "vllm:spec_decode_num_accepted_tokens_total"))


async def test_clients_that_hang_up_free_their_sessions(serve: Serve, eventually: Eventually) -> None:
    body = {"model": "outrider-demo", "prompt": "import os\n", "max_tokens": 4000, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=serve.url, trust_env=False, timeout=240) as client:
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            await anext(response.aiter_lines())
        waiting = asyncio.create_task(client.post("/v1/completions", json=body))
        await asyncio.sleep(0.5)
        waiting.cancel()
    async with grpc.aio.insecure_channel(serve.grpc_address) as channel:
        call = generation_pb2_grpc.GenerationStub(channel).Generate(
            generation_pb2.GenerateRequest(text="import os\n", max_tokens=4000, ignore_eos=True)
        )
        await call.read()
        await call.read()
        call.cancel()
    for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        await asyncio.to_thread(eventually, lambda name=name: metric(serve, name) == 0, f"{name} is 0 again")


def test_the_lines_that_it_prints_work_when_pasted(serve: Serve) -> None:
    import subprocess

    curl = next(line for line in serve.said if line.strip().startswith("curl "))
    python = next(line for line in serve.said if "from openai import OpenAI" in line)
    answered = subprocess.run(["bash", "-c", curl + " -s"], capture_output=True, text=True, timeout=240)
    text = json.loads(answered.stdout)["choices"][0]["text"]
    printed = subprocess.run(["bash", "-c", python], capture_output=True, text=True, timeout=240)
    assert printed.returncode == 0, printed.stderr
    assert text.strip() and printed.stdout.strip() == text.strip()


def test_the_lines_of_a_model_that_answers_work_when_pasted(serve: Serve) -> None:
    import subprocess

    lines = [make(serve.url, "outrider-demo", chat=True) for make in (curl_line, python_line)]
    asked = [
        subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=240) for line in lines
    ]
    assert asked[1].returncode == 0, asked[1].stderr
    text = json.loads(asked[0].stdout)["choices"][0]["message"]["content"]
    assert text.strip() and asked[1].stdout.strip() == text.strip()


def test_an_answer_can_be_replayed_with_the_seed_that_it_names(serve: Serve) -> None:
    body = {"prompt": "def area(", "max_tokens": 30, "temperature": 1.0, "model": "outrider-demo"}
    first = httpx.post(serve.url + "/v1/completions", json=body, trust_env=False, timeout=240).json()
    other = httpx.post(serve.url + "/v1/completions", json=body, trust_env=False, timeout=240).json()
    again = httpx.post(
        serve.url + "/v1/completions", json={**body, "seed": first["seed"]}, trust_env=False, timeout=60
    ).json()
    assert again["choices"] == first["choices"]
    assert other["seed"] != first["seed"]


def test_the_page_and_the_live_service_that_it_shows(serve: Serve, eventually: Eventually) -> None:
    page = httpx.get(serve.url, trust_env=False)
    assert page.status_code == 200 and "script-src 'self'" in page.headers["content-security-policy"]
    asked = {"prompt": "def area(", "max_tokens": 30, "ignore_eos": True, "return_speculation": True}
    answer = httpx.post(serve.url + "/v1/completions", json=asked, trust_env=False, timeout=240).json()
    steps = answer["choices"][0]["speculation"]["steps"]
    assert sum(len(step["tokens"]) for step in steps) == answer["usage"]["completion_tokens"] == 30
    told: list[dict[str, object]] = []

    def shown() -> bool:
        """Whether one worker of each role is there: another test may just have killed one."""
        with httpx.stream("GET", serve.url + "/v1/live", trust_env=False, timeout=240) as live:
            assert live.headers["content-type"].startswith("text/event-stream")
            line = next(line for line in live.iter_lines() if line.startswith("data: "))
        told.append(json.loads(line[6:]))
        workers = told[-1]["service"]
        assert isinstance(workers, dict)
        return bool(workers["verifiers"] and workers["drafters"] and workers["positions"])

    eventually(shown, "the live service has a verifier, a drafter and drafts")
    assert "def area" not in json.dumps(told)


async def test_tools_that_must_be_called_are_called_with_drafts_and_without(serve: Serve) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    client = openai.AsyncOpenAI(base_url=f"{serve.url}/v1", api_key="none")
    answers = []
    for seed, k in ((1, None), (1, 0), (2, None), (2, 0)):
        answer = await client.chat.completions.create(
            model="outrider-demo",
            messages=[{"role": "user", "content": "weather?"}],
            tools=[tool],  # type: ignore[list-item]
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=2.0,
            seed=seed,
            extra_body={"num_speculative_tokens": k},
        )
        (choice,) = answer.choices
        (call,) = choice.message.tool_calls or ()
        assert call.type == "function" and call.function.name == "weather"
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        arguments = json.loads(call.function.arguments)
        assert arguments["days"] in (1, 2, 3) and len(arguments["city"]) <= 12
        answers.append(call.function.arguments)
    assert answers[0] == answers[1] != answers[2] == answers[3]
