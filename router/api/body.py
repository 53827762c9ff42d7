"""A request's body: bytes up to a limit, then JSON."""

from __future__ import annotations

import json

from starlette.requests import Request

from outrider.errors import InvalidRequest, TooLarge

MAX_BODY_BYTES = 8 * 1024 * 1024


async def read_json(request: Request, max_bytes: int) -> object:
    """Returns the decoded body. Never holds more than `max_bytes` of it, whatever the content-length says.

    Raises TooLarge, or InvalidRequest that says where the JSON is broken."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise InvalidRequest(f"content-encoding {encoding} is not supported: send the body as it is")
    body = bytearray()
    async for chunk in request.stream():
        if len(body) + len(chunk) > max_bytes:
            raise too_large(max_bytes)
        body += chunk
    return _decoded(bytes(body))


def too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the body is over the limit of {max_bytes} bytes")


def _decoded(body: bytes) -> object:
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"the body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: byte {error.start} is not UTF-8") from None
    except (ValueError, RecursionError):  # an integer of thousands of digits; nesting thousands deep
        raise InvalidRequest(
            "the body is not valid JSON: a number is too long or the nesting too deep"
        ) from None
