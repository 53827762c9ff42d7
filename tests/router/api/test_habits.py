"""What clients of OpenAI's and vLLM's servers look for beside the answers."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import get_type_hints

import httpx
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from outrider import __version__
from outrider.errors import StartupError
from outrider.options.sessions import SessionOptions
from outrider.store.memory import MemoryStore
from router.api import schema
from router.api.fields import UNSUPPORTED, Fields
from router.api.json_text import to_json
from router.api.responses import Json
from router.api.responses_request import ResponsesRequest
from router.router import Router
from tests.router.api.scripted import ScriptedRunner, byte_level, served, steps
from tests.router.api.test_http import ClientOf

TOKENIZER = byte_level()
MODEL = served(TOKENIZER)
TURNS = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(client_of: ClientOf) -> httpx.AsyncClient:
    return client_of(ScriptedRunner(MODEL, lambda request: steps([70], 1)))


@pytest.fixture
async def page() -> AsyncIterator[httpx.AsyncClient]:
    """A client of a router that lets pages of two sites ask."""
    router = Router(
        MemoryStore(),
        num_speculative_tokens=0,
        max_sessions=1,
        cors_origins=["https://a.example", "https://b.example"],
    )
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(router.app), base_url="http://router"
    ) as client:
        yield client
    await router.store.close()


async def test_text_to_tokens_and_back(client: httpx.AsyncClient) -> None:
    ids = TOKENIZER.encode("naïve fox").ids
    asked = {"prompt": "naïve fox", "return_token_strs": True, "model": "demo"}
    told = (await client.post("/tokenize", json=asked)).json()
    assert (told["tokens"], told["count"], told["max_model_len"]) == (ids, len(ids), MODEL.max_context)
    assert told["token_strs"] == [TOKENIZER.id_to_token(each) for each in ids]
    plain = TOKENIZER.encode("naïve fox", add_special_tokens=False).ids
    told = (await client.post("/tokenize", json={"prompt": "naïve fox", "add_special_tokens": False})).json()
    assert told["tokens"] == plain and told["token_strs"] is None
    assert (await client.post("/detokenize", json={"tokens": plain})).json() == {"prompt": "naïve fox"}
    chat = (await client.post("/tokenize", json={"messages": TURNS})).json()
    assert chat["tokens"] == TOKENIZER.encode("<s>user: hi\nassistant:", add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("/tokenize", {}, "give prompt or messages: one of them"),
        ("/tokenize", {"prompt": "x", "messages": TURNS}, "give prompt or messages: one of them"),
        ("/tokenize", {"prompt": "x" * 10_000}, "the context of 64 tokens takes at most"),
        ("/detokenize", {"tokens": [-1]}, "tokens has token id -1 at index 0"),
        (
            "/detokenize",
            {"tokens": [70] * 65537},
            "tokens has 65537 token ids, and may have 65536",
        ),
        ("/detokenize", {"tokens": "x"}, "tokens must be an array of token ids, not a string"),
        ("/detokenize", {}, "tokens is required"),
    ],
)
async def test_bad_ones_are_refused(
    client: httpx.AsyncClient, route: str, body: object, message: str
) -> None:
    response = await client.post(route, json=body)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


async def test_what_the_server_says_of_itself(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": __version__}
    info = (await client.get("/tokenizer_info")).json()
    assert info["model_max_length"] == MODEL.max_context and "chat_template" in info
    assert (await client.get("/tokenizer_info?model=demo")).json() == info
    assert (await client.get("/tokenizer_info?model=other")).status_code == 404
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert (model["root"], model["parent"], model["permission"][0]["allow_sampling"]) == ("demo", None, True)
    for route in ("/version", "/v1/models", "/v1/models/demo", "/metrics", "/health"):
        head = await client.head(route)
        assert (head.status_code, head.content) == (200, b""), route


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        (completion_create_params.CompletionCreateParamsStreaming, schema.CompletionRequest),
        (chat_create_params.CompletionCreateParamsStreaming, schema.ChatRequest),
        (response_create_params.ResponseCreateParamsStreaming, ResponsesRequest),
    ],
    ids=["completions", "chat", "responses"],
)
def test_every_field_that_openai_has_is_known_and_documented(asked: type, kind: type[Fields]) -> None:
    taken = kind.model_fields.keys() | kind.neutral.keys()
    fields = get_type_hints(asked).keys()
    assert not fields - taken - UNSUPPORTED
    told = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    assert not [name for name in fields | taken | UNSUPPORTED if f"`{name}`" not in told]


async def test_errors_have_the_codes_that_sdks_look_for(client: httpx.AsyncClient) -> None:
    for body, code in (
        ({"prompt": "x", "model": "other"}, "model_not_found"),
        ({"prompt": [70] * 64}, "context_length_exceeded"),
        ({"prompt": "x", "max_tokens": 100}, "context_length_exceeded"),
        ({"prompt": "x" * 10_000}, "context_length_exceeded"),
        ({"prompt": "x", "max_tokens": 0}, None),
    ):
        error = (await client.post("/v1/completions", json=body)).json()["error"]
        assert error["code"] == code, error


async def test_a_request_keeps_its_id_or_gets_one(page: httpx.AsyncClient) -> None:
    kept = await page.get("/v1/models", headers={"x-request-id": "mine-1"})
    assert kept.headers["x-request-id"] == "mine-1"
    for given in ({}, {"x-request-id": "two words"}, {"x-request-id": "x" * 129}):
        first, second = [(await page.get("/nothing", headers=given)).headers["x-request-id"] for _ in "ab"]
        assert first.startswith("req_") and first != second


async def test_pages_of_the_sites_that_are_named_may_ask(page: httpx.AsyncClient) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    for origin, code in (("https://b.example", 200), ("https://c.example", 400)):
        answer = await page.options("/v1/completions", headers={"origin": origin, **asked})
        assert answer.status_code == code
        assert (answer.headers.get("access-control-allow-origin") == origin) is (code == 200)
    answer = await page.get("/health", headers={"origin": "https://a.example"})
    assert answer.headers["access-control-allow-origin"] == "https://a.example"


def test_an_origin_is_a_scheme_and_a_host() -> None:
    assert SessionOptions(cors_origin="https://a.example, *").cors_origins == ["https://a.example", "*"]
    for wrong in ("a.example", "https://a.example/", "https://a.example,", ""):
        with pytest.raises(StartupError, match="--cors-origin is a scheme and a host, such as https://a"):
            SessionOptions(cors_origin=wrong)


async def test_what_is_long_is_not_written_on_the_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: list[int] = []

    def noted(body: Json) -> str:
        writers.append(threading.get_ident())
        return to_json(body)

    monkeypatch.setattr("router.api.http.to_long_json", noted)
    assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 200
    assert (await client.post("/detokenize", json={"tokens": [70]})).status_code == 200
    assert len(writers) == 2 and threading.get_ident() not in writers


async def test_no_page_may_ask_otherwise(client: httpx.AsyncClient) -> None:
    answer = await client.get("/health", headers={"origin": "https://a.example"})
    assert "access-control-allow-origin" not in answer.headers
