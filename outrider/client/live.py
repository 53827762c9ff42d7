"""What a router tells of the live service, as it comes: GET /v1/live."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import httpx

from outrider.client.connection import NOT_TRUSTED, STREAM, not_trusted
from outrider.client.streamed import NO_ANSWER, server_sent_events
from outrider.errors import InvalidRequest, Unauthenticated, Unavailable

SILENCE_SECONDS = 5.0  # it tells twice a second
UNTOLD_SECONDS = 30.0  # in which it may only say that it is there
FOR_EVER = frozenset({400, 401, 403, 404, 405})  # statuses after which trying again is of no use

Told = dict[str, Any]  # docs/api.md, "The live service"
NUMBER, MOST = (int, float), 1e15
COUNTED = {"verified": NUMBER, "accepted": NUMBER}
LOADED = {"id": str, "model": str, "kv_usage": NUMBER}
FORM = {  # as far as it is shown: what is read of a server reaches a terminal
    "seconds": NUMBER,
    "service": {
        "counts": dict.fromkeys(("sessions", "verifiers", "drafters"), int),
        "verifiers": [
            LOADED
            | dict.fromkeys(("running", "waiting", "step_seconds", "step_tokens", "price"), NUMBER)
            | dict.fromkeys(("goodput", "starvation", "draft_gain"), NUMBER)
            | dict.fromkeys(("draining", "drafts_rest"), bool)
        ],
        "drafters": [
            LOADED
            | dict.fromkeys(("sessions", "token_seconds", "busy"), NUMBER)
            | {"round_trips": [{"verifier": str, "seconds": NUMBER}]}
        ],
        "sources": [{"source": str, **COUNTED}],
        "positions": [COUNTED],
    },
    "sessions": [
        {"id": str, "verifier": str, "drafters": [str], "undrafted": str}
        | dict.fromkeys(("k", "window", "acceptance", "tokens"), NUMBER)
    ],
}


def live(http: httpx.Client, url: str) -> Generator[Told, None, None]:
    """Yields what the router at `url` tells, twice a second. Raises Unavailable where it cannot be reached,
    breaks off or refuses for now, Unauthenticated where it wants another key, InvalidRequest where this is
    no router."""
    try:
        with http.stream("GET", f"{url}/v1/live", extensions=STREAM) as response:
            if response.status_code != 200:
                response.read()
                raise _refusal(response)
            for event in server_sent_events(_telling(response.iter_bytes())):
                yield _told(event.data)
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise InvalidRequest(f"{url} is no address of a router: {str(error).rstrip('.')}") from None
    except httpx.ConnectError as error:
        if not_trusted(error):
            raise InvalidRequest(NOT_TRUSTED.format(url)) from None
        raise Unavailable(f"no server answers at {url}") from None
    except httpx.TransportError:
        raise Unavailable(f"the connection to {url} broke off") from None
    raise Unavailable(f"the router at {url} ended the stream")


def _telling(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the pieces. Signs of life alone end them after a while: whoever waits for the first event would
    wait without end."""
    heard = time.monotonic()
    for piece in pieces:
        if b"data" in piece:
            heard = time.monotonic()
        elif time.monotonic() - heard > UNTOLD_SECONDS:
            raise httpx.ReadError("nothing is told")
        yield piece


def _told(data: str) -> Told:
    try:
        told = json.loads(data)
        if "error" in told:
            raise Unavailable(str(told["error"]["message"]))
        _check(told, FORM)
    except (*NO_ANSWER, RecursionError):
        raise InvalidRequest("what came is no live service: is it a router of Outrider?") from None
    return dict(told)


def _check(told: Any, form: Any) -> None:
    """Raises TypeError or KeyError if not all that the form has is there, and of its types. A number is
    finite and of a size that can be shown."""
    if isinstance(form, dict):
        for name, kind in form.items():
            _check(told[name], kind)
    elif isinstance(form, list):
        if not isinstance(told, list):
            raise TypeError(told)
        for one in told:
            _check(one, form[0])
    elif not isinstance(told, form) or (form is NUMBER and not abs(told) < MOST):
        raise TypeError(told)


def _refusal(response: httpx.Response) -> InvalidRequest | Unavailable | Unauthenticated:
    try:
        message = str(response.json()["error"]["message"])
    except (*NO_ANSWER, RecursionError):
        message = f"the server answered {response.status_code} {response.reason_phrase}; is it Outrider?"
    if response.status_code == Unauthenticated.http_status:
        return Unauthenticated(message)
    return (InvalidRequest if response.status_code in FOR_EVER else Unavailable)(message)
