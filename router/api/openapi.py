"""The OpenAPI document of the HTTP API: request bodies from the schemas that check them, and what comes back.

What pydantic cannot know (fields with checks of their own, ranges that are checked later) is written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic.json_schema import models_json_schema

from outrider import __version__
from outrider.options.sessions import MAX_SEED
from router.api import schema

Json = Mapping[str, Any]

PATH = "/openapi.json"
REF = "#/components/schemas/{model}"

_TOKEN_ID: Json = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_TOKEN_IDS: Json = {"type": "array", "items": _TOKEN_ID, "minItems": 1}
_TEXT: Json = {"type": "string", "minLength": 1}
_NUMBER: Json = {"type": "number"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_FIELDS: Mapping[str, Json] = {
    "prompt": {
        "description": "Text or token ids, or several of either: then there is a choice for each.",
        "anyOf": [
            _TEXT,
            _TOKEN_IDS,
            {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": schema.MAX_PROMPTS},
            {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": schema.MAX_PROMPTS},
        ],
    },
    "role": {"enum": list(schema.ROLES)},
    "content": {
        "description": "Text, or parts of it.",
        "anyOf": [
            {"type": "string"},
            {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                    "required": ["type", "text"],
                    "additionalProperties": False,
                },
            },
        ],
    },
    "stop": {
        "description": "The text ends before the first of them.",
        "anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": schema.MAX_STOPS}],
    },
    "logit_bias": {
        "description": "By token id: added to its logit.",
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "n": {"const": 1},
    "max_tokens": {"type": "integer", "minimum": 1, "description": "Most output tokens."},
    "max_completion_tokens": {"type": "integer", "minimum": 1, "description": "Newer name of max_tokens."},
    "temperature": {**_NUMBER, "minimum": 0, "maximum": 100, "description": "0 = greedy."},
    "top_p": {**_NUMBER, "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": -1, "maximum": 2**31 - 1, "description": "0 or -1 = off."},
    "min_p": {**_NUMBER, "minimum": 0, "maximum": 1},
    "presence_penalty": {**_NUMBER, "minimum": -2, "maximum": 2},
    "frequency_penalty": {**_NUMBER, "minimum": -2, "maximum": 2},
    "repetition_penalty": {**_NUMBER, "exclusiveMinimum": 0, "maximum": 10},
    "seed": {"type": "integer", "minimum": 0, "maximum": MAX_SEED, "description": "Replays an answer."},
    "num_speculative_tokens": {
        "type": "integer",
        "minimum": 0,
        "maximum": schema.MAX_SPECULATIVE_TOKENS,
        "description": "Most draft tokens a step; absent = adaptive, 0 = off.",
    },
}


def add_document(app: FastAPI) -> None:
    """Serves it at GET /openapi.json."""
    document = openapi()

    @app.get(PATH)
    async def openapi_document() -> JSONResponse:
        return JSONResponse(document)


def openapi() -> Json:
    """The document, as JSON."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Outrider",
            "version": __version__,
            "description": "The OpenAI-compatible HTTP API. A null is an absent field.",
        },
        "paths": _paths(),
        "components": {"schemas": {**_requests(), **_ANSWERS}},
    }


def _requests() -> dict[str, Json]:
    """The bodies' schemas by name, those that they contain included."""
    kinds = [(schema.CompletionRequest, "validation"), (schema.ChatRequest, "validation")]
    _, built = models_json_schema(kinds, ref_template=REF)  # type: ignore[arg-type]
    return {name: _described(body) for name, body in built["$defs"].items()}


def _described(body: dict[str, Any]) -> Json:
    required = body.get("required", [])
    properties = {}
    for name, field in body["properties"].items():
        known = {key: value for key, value in field.items() if key not in ("title", "default")}
        known = dict(_FIELDS.get(name, known))
        properties[name] = known if name in required else {"anyOf": [known, {"type": "null"}]}
    return {**body, "properties": properties}


def _paths() -> Json:
    model = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {
        "/v1/completions": {"post": _generation("Continue a prompt.", "CompletionRequest", "Completion")},
        "/v1/chat/completions": {"post": _generation("Continue a conversation.", "ChatRequest", "Chat")},
        "/v1/sessions/{id}/events": {"get": _resumption()},
        "/v1/models": {
            "get": {"summary": "The models that are served.", "responses": {**_json("Models"), **_refused()}}
        },
        "/v1/models/{name}": {
            "get": {
                "summary": "One of them.",
                "parameters": [model],
                "responses": {**_json("Model"), **_refused("404", "503")},
            }
        },
        "/health": {"get": _probe("Whether requests can be served."), "head": _probe("The same.")},
        "/ready": {"get": _probe("The same, and what is amiss."), "head": _probe("The same.")},
        "/metrics": {"get": {"summary": "For Prometheus.", "responses": {"200": _text("Metrics.")}}},
        PATH: {"get": {"summary": "This document.", "responses": {"200": _object("The document.")}}},
    }


def _generation(summary: str, request: str, answer: str) -> Json:
    content = {"application/json": {"schema": _ref(answer)}, **_EVENTS}
    last_event = {
        "name": "Last-Event-ID",
        "in": "header",
        "schema": {"type": "string", "maxLength": 1000},
        "description": "Of a stream that broke off: it goes on after that event, and the body is not needed.",
    }
    return {
        "summary": summary,
        "parameters": [last_event],
        "requestBody": {"content": {"application/json": {"schema": _ref(request)}}},
        "responses": {
            "200": {"description": "The answer; with stream = true, its events.", "content": content},
            **_refused("400", "401", "404", "409", "413", "429", "499", "503"),
        },
    }


def _resumption() -> Json:
    session = {
        "name": "id",
        "in": "path",
        "required": True,
        "description": "Of the answer, or the part of an event's id before the colon.",
        "schema": {"type": "string", "pattern": "^(cmpl-|chatcmpl-)?[0-9a-f]{32}$"},
    }
    after = {
        "name": "after",
        "in": "query",
        "description": "Output tokens that the client has: the part of an event's id after the colon.",
        "schema": {"type": "string", "pattern": "^[0-9]{1,9}(,[0-9]{1,9})*$"},
    }
    return {
        "summary": "Go on with a stream that broke off.",
        "parameters": [session, after],
        "responses": {
            "200": {"description": "What comes after it.", "content": _EVENTS},
            **_refused("400", "401", "404", "409", "429", "499", "503"),
        },
    }


def _probe(summary: str) -> Json:
    return {"summary": summary, "responses": {"200": _text("It is so."), "503": _text("It is not; why.")}}


def _json(answer: str) -> dict[str, Json]:
    return {"200": {"description": "The answer.", "content": {"application/json": {"schema": _ref(answer)}}}}


def _object(description: str) -> Json:
    return {"description": description, "content": {"application/json": {"schema": {"type": "object"}}}}


def _text(description: str) -> Json:
    return {"description": description, "content": {"text/plain": {"schema": {"type": "string"}}}}


def _refused(*codes: str) -> dict[str, Json]:
    content = {"application/json": {"schema": _ref("Error")}}
    return {code: {"description": _REFUSALS[code], "content": content} for code in codes}


def _ref(name: str) -> Json:
    return {"$ref": REF.format(model=name)}


_EVENTS: Json = {"text/event-stream": {}}  # OpenAPI 3.1 has no words for the events of a stream
_REFUSALS = {
    "400": "The request cannot be served as it is; `param` names the field.",
    "401": "The API key is missing or unknown.",
    "404": "No such model, or no such session.",
    "409": "The stream goes on by another connection.",
    "413": "The body is too large.",
    "429": "Too much is asked at the moment; Retry-After says when to come again.",
    "499": "The request was cancelled.",
    "503": "Nothing can serve it at the moment; Retry-After says when to come again.",
}


def _record(required: Mapping[str, Json], optional: Mapping[str, Json] | None = None) -> Json:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
    }


def _list(kind: str, items: Json) -> Json:
    return _record({"object": {"const": kind}, "data": {"type": "array", "items": items}})


def _answer(kind: str, choice: Mapping[str, Json]) -> Json:
    reason: Json = {"finish_reason": {"enum": ["stop", "length"]}}
    choices = {"type": "array", "items": _record({"index": _COUNT, **choice, **reason}), "minItems": 1}
    return _record(
        {
            "id": {"type": "string"},
            "object": {"const": kind},
            "created": {"type": "integer", "description": "Unix seconds."},
            "model": {"type": "string"},
            "seed": {"type": "integer", "minimum": 0, "maximum": MAX_SEED},
            "choices": choices,
            "usage": _record(
                {"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT},
                {"prompt_tokens_details": {"type": "object"}},
            ),
            "metrics": {"type": "object", "description": "vLLM's speculative_decoding."},
        }
    )


_MESSAGE = _record({"role": {"const": "assistant"}, "content": {"type": "string"}})
_MODEL = _record(
    {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
        "max_model_len": {"type": "integer", "minimum": 1},
    }
)
_ANSWERS: Mapping[str, Json] = {
    "Completion": _answer("text_completion", {"text": {"type": "string"}}),
    "Chat": _answer("chat.completion", {"message": _MESSAGE}),
    "Model": _MODEL,
    "Models": _list("list", _MODEL),
    "Error": _record(
        {
            "error": _record(
                {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                }
            )
        }
    ),
}
