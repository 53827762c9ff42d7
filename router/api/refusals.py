"""An error as an HTTP answer: OpenAI's shape, and Anthropic's on the routes that are Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi.responses import JSONResponse

from outrider.errors import OutriderError, Overloaded, TooLarge, Unauthenticated
from router.api.responses import Json, error_body

MESSAGES = "/v1/messages"
RETRY_SECONDS = 1  # after which one who was refused for now may ask again
ANTHROPIC_TYPES: Mapping[int, str] = {  # docs.anthropic.com, errors
    TooLarge.http_status: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


def refusal(
    error: OutriderError, path: str, status: int | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Returns the answer to a request of that path. `status`: if it is not the error's own."""
    headers = dict(headers or {})
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    elif error.http_status in (429, 503):
        headers["Retry-After"] = str(error.retry_after if isinstance(error, Overloaded) else RETRY_SECONDS)
    body = anthropic_error(error) if path.startswith(MESSAGES) else error_body(error)
    return JSONResponse(body, status_code=status or error.http_status, headers=headers)


def anthropic_error(error: OutriderError) -> Json:
    kind = ANTHROPIC_TYPES.get(error.http_status, error.kind)
    return {"type": "error", "error": {"type": kind, "message": error.message}}
