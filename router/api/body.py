"""A request's body: bytes up to a limit, then JSON."""

from __future__ import annotations

import json

from starlette.requests import Request

from outrider.errors import InvalidRequest, TooLarge


async def read_json(request: Request, max_bytes: int) -> object:
    """The decoded body. Never holds more than `max_bytes` of it, whatever the content-length says.

    Raises TooLarge or InvalidRequest (saying where the JSON is broken)."""
    body = bytearray()
    async for chunk in request.stream():
        if len(body) + len(chunk) > max_bytes:
            raise TooLarge(f"the body is over the limit of {max_bytes} bytes")
        body += chunk
    return _decoded(bytes(body))


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
