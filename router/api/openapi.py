"""The OpenAPI document: FastAPI's own, with the bodies that the routes read themselves."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import FastAPI, Path, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic.json_schema import models_json_schema

from outrider.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    OutriderError,
    Overloaded,
    Superseded,
    TooLarge,
    TooSlow,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    UnknownSession,
)
from router.api import position, schema
from router.api.answers import Error
from router.api.fields import Fields
from router.api.json_text import to_json
from router.api.messages_request import CountRequest, MessagesRequest
from router.api.responses_request import ResponsesRequest

REF = "#/components/schemas/{model}"
_EVENTS: Mapping[str, Any] = {"text/event-stream": {}}  # OpenAPI 3.1 has no words for the events of a stream


def _text(pattern: str) -> dict[str, Any]:
    """Returns what the document says of such a text. The routes refuse others by sentences of their own."""
    return {"pattern": f"^{pattern}$"}


ModelName = Annotated[str, Path(json_schema_extra={"minLength": 1})]
OptionalName = Annotated[str, Query(description="Empty = the first one.")]
AnswerId = Annotated[
    str,
    Path(
        description="That of the answer, or the part of an event's id before the colon.",
        json_schema_extra=_text(position.ID.pattern),
    ),
]
After = Annotated[
    str | None,
    Query(
        description="Output tokens that the client has: the part of an event's id after the colon.",
        json_schema_extra=_text(position.POSITION.pattern),
    ),
]
_LAST_EVENT_ID: Mapping[str, Any] = {
    "name": "Last-Event-ID",
    "in": "header",
    "description": "In a request for a stream that broke off: it goes on after that event.",
    "schema": {"type": "string", **_text(f"({position.ID.pattern}:{position.POSITION.pattern})?")},
}


class Application(FastAPI):
    """An application whose routes read their bodies themselves and never refuse by FastAPI's own errors."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # of operation ids
                document = super().openapi()
            for operations in document["paths"].values():
                for operation in operations.values():
                    del operation["operationId"]  # GET and HEAD of one route would share it
                    operation["responses"].pop("422", None)
            schemas = document["components"]["schemas"]
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            schemas |= _bodies()
        return super().openapi()

    def setup(self) -> None:
        """Serves the document. FastAPI would write it down for each who asks, which takes milliseconds of the
        event loop and needs no key."""
        written: list[str] = []

        async def document(request: Request) -> Response:
            if not written:
                written.append(to_json(self.openapi()))
            return Response(written[0], media_type=JSONResponse.media_type)

        self.add_route("/openapi.json", document, include_in_schema=False)


KINDS = (
    schema.CompletionRequest,
    schema.ChatRequest,
    MessagesRequest,
    CountRequest,
    ResponsesRequest,
    schema.TokenizeRequest,
    schema.DetokenizeRequest,
)


def _bodies() -> dict[str, Any]:
    kinds = [(kind, "validation") for kind in KINDS]
    _, built = models_json_schema(kinds, ref_template=REF)  # type: ignore[arg-type]
    return dict(built["$defs"])


def _refusals(*errors: type[OutriderError], shape: type = Error) -> dict[int | str, dict[str, Any]]:
    """Returns what the document says of these errors: their codes, and for each code when it comes. `shape`:
    of their bodies."""
    told: dict[int | str, dict[str, Any]] = {}
    for error in errors:
        known = told.setdefault(error.http_status, {"model": shape, "description": ""})
        reason = (error.__doc__ or "").partition("\n")[0]
        known["description"] = f"{known['description']} {reason}".lstrip()
    return told


def generation(kind: type[schema.SharedFields], whole: type, refused: type = Error) -> dict[str, Any]:
    """Returns what the document says of a route that reads such a body and answers so, whole or in events."""
    told = {"description": "The answer; with stream = true, its events.", "model": whole, "content": _EVENTS}
    return {
        "response_class": Response,
        "responses": {200: told, **_refusals(*_GENERATION, TooLarge, TooSlow, shape=refused)},
        "openapi_extra": {"requestBody": _body(kind), "parameters": [_LAST_EVENT_ID]},
    }


def token_route(kind: type[schema.ModelFields], whole: type, refused: type = Error) -> dict[str, Any]:
    """Returns what the document says of a route that reads such a body and answers so."""
    refusals = _refusals(
        InvalidRequest,
        Unauthenticated,
        UnknownModel,
        Overloaded,
        Unavailable,
        TooLarge,
        TooSlow,
        shape=refused,
    )
    return {
        "response_class": Response,
        "responses": {200: {"description": "The answer.", "model": whole}, **refusals},
        "openapi_extra": {"requestBody": _body(kind)},
    }


def _body(kind: type[Fields]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": REF.format(model=kind.__name__)}}}
    return {"required": True, "content": content}


_GENERATION = (
    InvalidRequest,
    Unauthenticated,
    UnknownModel,
    UnknownSession,
    Superseded,
    Overloaded,
    Cancelled,
    Unavailable,
    DeadlineExceeded,
)
# What the document says of the other routes.
RESUMPTION: dict[str, Any] = {
    "response_class": Response,
    "responses": {
        200: {"description": "What comes after it.", "content": _EVENTS},
        **_refusals(*_GENERATION),
    },
    "openapi_extra": {"parameters": [_LAST_EVENT_ID]},
}
LIVE: dict[str, Any] = {
    "response_class": Response,
    "responses": {
        200: {"description": "An event twice a second, without end.", "content": _EVENTS},
        **_refusals(Unauthenticated, Overloaded),
    },
}
MODELS: dict[str, Any] = {"responses": _refusals(Unauthenticated, Overloaded)}
MODEL: dict[str, Any] = {"responses": _refusals(Unauthenticated, UnknownModel, Overloaded, Unavailable)}
PROBE: dict[str, Any] = {
    "response_class": PlainTextResponse,
    "responses": {503: {"model": str, "description": "They cannot, and why."}},
}
