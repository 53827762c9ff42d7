"""`x-request-id`: a client's own comes back with the answer; a request without one gets one."""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.refusals import MESSAGES

REQUEST_ID = "x-request-id"
GIVEN = re.compile(r"[!-~]{1,128}")  # what is worth to be given back: printable ASCII without blanks


class RequestIds:
    """An application whose answers carry the id of their request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if GIVEN.fullmatch(given) else f"req_{secrets.token_hex(16)}"

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = request_id
                if scope["path"].startswith(MESSAGES):
                    headers["request-id"] = request_id  # as Anthropic's clients know it
            await send(message)

        await self._app(scope, receive, answer)
