"""The OpenAPI document says what the application serves and what its schemas take."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from jsonschema import Draft202012Validator

from outrider.errors import InvalidRequest
from router.api import schema
from router.api.fields import Fields
from router.api.messages_request import CountRequest, MessagesRequest, Turn
from router.api.responses_request import ResponsesRequest
from router.api.turns import ChatMessage
from router.api.validation import prepare
from router.requests import ServedModel
from tests.router.api import scripted

APP = scripted.application()
DOCUMENT = APP.openapi()
SCHEMAS = DOCUMENT["components"]["schemas"]
KINDS: list[type[Fields]] = [
    schema.CompletionRequest,
    schema.ChatRequest,
    ChatMessage,
    schema.StreamOptions,
]
KINDS += [schema.StreamOptions, MessagesRequest, CountRequest, Turn, ResponsesRequest]


def body(kind: type[schema.GenerationFields]) -> Draft202012Validator:
    reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return Draft202012Validator({**reference, "components": DOCUMENT["components"]})


@pytest.fixture
def model() -> ServedModel:
    return scripted.served(scripted.byte_level(), max_context=8192)


def test_every_route_is_in_it_and_no_other() -> None:
    served = {
        (route.path.replace(":path", ""), method)
        for route in APP.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    described = {(path, method.upper()) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == served


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(APP), base_url="http://router") as client:
        yield client


async def test_it_is_served(http: httpx.AsyncClient) -> None:
    assert (await http.get("/openapi.json")).json() == DOCUMENT


async def test_it_is_written_down_once(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no key, and takes milliseconds of the event loop."""
    told = (await http.get("/openapi.json")).content
    monkeypatch.delattr(type(APP), "openapi")
    monkeypatch.setattr(APP, "openapi_schema", {"paths": {}})
    assert (await http.get("/openapi.json")).content == told


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("post", "/v1/completions", {"prompt": ["a", "b"]}, 200),
        ("post", "/v1/chat/completions", CHAT, 200),
        ("post", "/v1/messages", {**CHAT, "max_tokens": 3}, 200),
        ("post", "/v1/messages", CHAT, 400),
        ("post", "/v1/messages/count_tokens", CHAT, 200),
        ("post", "/v1/responses", {"input": "hi"}, 200),
        ("post", "/v1/responses", {"input": 5}, 400),
        ("post", "/v1/completions", {"prompt": "a", "n": 65}, 400),
        ("post", "/v1/completions", {"prompt": "a", "model": "none"}, 404),
        ("get", "/v1/models", None, 200),
        ("get", "/v1/models/{name}", None, 200),
        ("get", "/v1/sessions/{id}/events", None, 400),
    ],
)
async def test_answers_are_as_it_says(
    http: httpx.AsyncClient, method: str, path: str, body: object, code: int
) -> None:
    response = await http.request(method, path.format(name="demo", id="x"), json=body)
    assert response.status_code == code
    content = DOCUMENT["paths"][path][method]["responses"][str(code)]["content"]["application/json"]
    described = {**content["schema"], "components": DOCUMENT["components"]}
    Draft202012Validator(described).validate(response.json())


def test_it_knows_no_refusal_that_is_not_ours() -> None:
    assert not {"HTTPValidationError", "ValidationError"} & SCHEMAS.keys()
    operations = [operation for path in DOCUMENT["paths"].values() for operation in path.values()]
    assert all("422" not in operation["responses"] for operation in operations)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_field_of_a_request_has_a_type(kind: type[schema.CompletionRequest]) -> None:
    described = SCHEMAS[kind.__name__]["properties"]
    assert described.keys() == kind.model_fields.keys() | kind.neutral.keys()
    for name, field in described.items():
        kinds = field.get("anyOf", [field])
        assert all(one.keys() & {"type", "anyOf", "enum", "const", "$ref"} for one in kinds), name


def test_the_schemas_are_schemas() -> None:
    for described in SCHEMAS.values():
        Draft202012Validator.check_schema(described)


@pytest.mark.parametrize(
    ("field", "within", "beyond"),
    [
        ("temperature", [0, 100], [-0.1, 100.5, "1"]),
        ("top_p", [0.1, 1], [0, 1.5]),
        ("top_k", [-1, 0, 2**31 - 1], [-2, 2**31, 1.5]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
        ("repetition_penalty", [0.01, 100], [0, 100.5]),
        ("seed", [0, 2**64 - 1, None], [-1, 2**64]),
        ("num_speculative_tokens", [0, 1024], [-1, 1025]),
        ("max_tokens", [1], [-1, "1"]),
        ("stop", ["a", ["a", "b"], []], ["", [""], ["a"] * 17, 5]),
        ("logit_bias", [{"5": 100.0}], [{"5": 101}, {"x": 1}, [], {str(token): 1 for token in range(1025)}]),
        ("cache_salt", ["s", "s" * 1024, None], ["", "s" * 1025, 5]),
        ("n", [1, 64, None], [0, 65, 1.5]),
        ("prompt", ["a", [1, 2], ["a", "b"], [[1], [2]]], [[], 5, None, [[]]]),
        ("stream", [True, None], [1]),
        ("logprobs", [0, 20, None], [-1, 21, True]),
        ("prompt_logprobs", [0, 20, None], [-1, 21, True]),
        ("stop_token_ids", [[5], [], None], [5, ["a"], [5] * 1025]),
        ("min_tokens", [0, 16, None], [-1, True]),
        ("priority", [0, 2**31 - 1, None], [-1, 2**31]),
        ("best_of", [1, 64, None], [0, 65, True]),
        ("response_format", [{"type": "text"}, {"type": "json_object"}, None], ["text", 5]),
        ("structured_outputs", [{"regex": "a+"}, {"choice": ["a"]}, None], ["a+", 5]),
        ("user", ["ada", None], [5, "x" * 1025]),
        ("nonsense", [], [1, None]),
    ],
)
def test_it_allows_what_the_server_takes(
    model: ServedModel, field: str, within: list[Any], beyond: list[Any]
) -> None:
    request = {"prompt": "a"}
    validator = body(schema.CompletionRequest)
    for value in within:
        validator.validate({**request, field: value})
        prepare(schema.parse(schema.CompletionRequest, {**request, field: value}), model, lambda below: 0)
    for value in beyond:
        assert not validator.is_valid({**request, field: value}), value
        with pytest.raises(InvalidRequest):
            prepare(schema.parse(schema.CompletionRequest, {**request, field: value}), model, lambda below: 0)
