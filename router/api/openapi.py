"""The OpenAPI document of the HTTP API: request bodies as their schemas say, and what comes back."""

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

_COUNT: Json = {"type": "integer", "minimum": 0}


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
    return dict(built["$defs"])


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
