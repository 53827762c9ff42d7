"""`outrider batch`: a file of requests in OpenAI's batch format to a file of answers."""

from __future__ import annotations

import asyncio
import fcntl
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from outrider.errors import InvalidRequest
from outrider_cli.generate import DEFAULT_URL, ApiKey
from outrider_cli.reporting import reported

if TYPE_CHECKING:
    import httpx

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
LATER = (429, 502, 503, 504)  # asked again: the service has no room, or not yet what it needs
REFUSED = (401, 403)
MAX_LINE_BYTES = 8 * 2**20  # that the service takes as a request's body
MAX_ANSWER_BYTES = 2**28  # more than any answer has
BEGINNING = b'{"id": "batch_req_'  # of each line that is written
PRIORITY = 100  # unless a request has its own: what people ask for comes first
CONNECT_SECONDS = 5.0
SILENT_SECONDS = (
    3600.0  # without a byte, after which nobody answers: long answers behind others may take their time
)
# A machine that is gone says nothing either: after a minute of silence the system asks it every 15 seconds.
KEEP_ALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
KEEP_ALIVE += [
    (socket.IPPROTO_TCP, getattr(socket, name), seconds)
    for name, seconds in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
    if hasattr(socket, name)
]
WAIT_SECONDS = 1.0  # if the service does not say how long
MOST_WAIT_SECONDS = 60.0


def batch(
    input_file: Annotated[
        Path, typer.Option(help="Requests, one a line, as OpenAI's batches have them.", metavar="FILE")
    ],
    output_file: Annotated[
        Path,
        typer.Option(
            help="Answers, one a line, as they come. What is in it already is not asked again.",
            metavar="FILE",
        ),
    ],
    url: Annotated[str, typer.Option(help="Address of the HTTP API.")] = DEFAULT_URL,
    concurrency: Annotated[int, typer.Option(help="Most requests at a time.", min=1)] = 32,
    api_key: ApiKey = None,
) -> None:
    """Answer a file of requests; started again after any end, it goes on where it was."""
    with reported("batch"):
        requests = read_requests(input_file)
        with opened(output_file) as (output, answered):
            left = [request for request in requests if request["custom_id"] not in answered]
            asyncio.run(answer_all(left, output, url, concurrency, api_key))
        typer.echo(f"{len(requests)} requests: {len(left)} answered now, {len(requests) - len(left)} before")


def read_requests(path: Path) -> list[dict[str, Any]]:
    """Returns the requests of a file. Raises InvalidRequest that names the first line at fault."""
    requests, ids = [], set()
    try:
        if path.is_char_device():
            raise InvalidRequest(f"--input-file {path} is a device: name a file")
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidRequest(f"--input-file {path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            raise InvalidRequest(f"line {number} of {path} is not JSON") from None
        fault = _fault(request) or _encode(request)
        if fault is None and request["custom_id"] in ids:
            fault = f"has the custom_id {request['custom_id']!r} of an earlier line: each needs its own"
        if fault is not None:
            raise InvalidRequest(f"line {number} of {path} {fault}")
        ids.add(request["custom_id"])
        requests.append(request)
    return requests


def _fault(request: object) -> str | None:
    if not isinstance(request, dict) or not isinstance(request.get("custom_id"), str):
        return "needs a custom_id, a text of its own"
    if request.get("method", "POST") != "POST" or request.get("url") not in PATHS:
        return f"needs the method POST and a url that is one of {', '.join(PATHS)}"
    if not isinstance(request.get("body"), dict) or request["body"].get("stream"):
        return "needs a body, an object without stream"
    return None


def _encode(request: dict[str, Any]) -> str | None:
    """Puts the bytes that are sent into the body's place. Returns what is wrong with it."""
    try:
        request["body"] = json.dumps({"priority": PRIORITY, **request["body"]}, allow_nan=False).encode()
        request["custom_id"].encode()
    except UnicodeEncodeError:
        return "has a custom_id that is no valid Unicode: it has half of a surrogate pair"
    except ValueError:
        return "has a number that is not finite, which JSON has not"
    except RecursionError:
        return "is nested too deep"
    if (size := len(request["body"])) > MAX_LINE_BYTES:
        return f"has a body of {size} bytes; the service takes {MAX_LINE_BYTES}"
    return None


@contextmanager
def opened(path: Path) -> Iterator[tuple[IO[bytes], set[str]]]:
    """The output file, to go on with after its last whole line; and whose answers it has."""
    if path.exists() and not path.is_file():
        raise InvalidRequest(f"--output-file {path} is no file: what is in it must stay there to go on with")
    try:
        file = path.open("a+b")
    except OSError as error:
        raise InvalidRequest(f"--output-file {path} cannot be written: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidRequest(f"--output-file {path} is written to by another `outrider batch`") from None
        file.seek(0)
        whole = file.read()
        whole, half = whole[: whole.rfind(b"\n") + 1], whole[whole.rfind(b"\n") + 1 :]
        try:
            answered = {_answered(line) for line in whole.splitlines()}
            _ours(half)
        except (ValueError, RecursionError, KeyError, TypeError):
            raise InvalidRequest(
                f"--output-file {path} has lines that are no answers: name another file"
            ) from None
        file.truncate(len(whole))  # a process that was killed may leave half a line
        yield file, answered


def _ours(line: bytes) -> None:
    """Raises ValueError unless it may be the beginning of an answer: what others wrote is not cut."""
    if not (line.startswith(BEGINNING) or BEGINNING.startswith(line)):
        raise ValueError


def _answered(line: bytes) -> str:
    """Returns whose answer the line is."""
    _ours(line)
    return str(json.loads(line)["custom_id"])


async def answer_all(
    requests: list[dict[str, Any]], output: IO[bytes], url: str, concurrency: int, api_key: str | None
) -> None:
    """Writes the answers as they come, each line at once. Raises OutriderError if there is no such service or
    it refuses the key: that is the answer to no request."""
    import httpx

    from outrider.client.connection import authorization, server_address

    if api_key is not None and not api_key.isascii():
        raise InvalidRequest("--api-key must be ASCII text")
    headers = {"content-type": "application/json", "accept-encoding": "identity", **authorization(api_key)}
    base = server_address(url).removesuffix("/v1")
    limits = httpx.Limits(max_connections=concurrency)
    transport = httpx.AsyncHTTPTransport(limits=limits, socket_options=KEEP_ALIVE)
    silence = httpx.Timeout(SILENT_SECONDS, connect=CONNECT_SECONDS)
    waiting = iter(requests)
    async with httpx.AsyncClient(
        base_url=base, headers=headers, timeout=silence, transport=transport
    ) as http:

        async def work() -> None:
            for request in waiting:
                response, body = await _asked(http, request)
                told = {
                    "id": f"batch_req_{response.headers.get('x-request-id', '')}",
                    "custom_id": request["custom_id"],
                    "response": {
                        "status_code": response.status_code,
                        "request_id": response.headers.get("x-request-id"),
                        "body": body,
                    },
                    "error": None,
                }
                written = json.dumps(told, ensure_ascii=False)
                output.write(written.encode(errors="backslashreplace") + b"\n")  # half of a surrogate pair
                output.flush()

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(concurrency, len(requests))):
                    tasks.create_task(work())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None


async def _post(http: httpx.AsyncClient, request: dict[str, Any]) -> tuple[httpx.Response, bytearray]:
    """Returns the answer and its bytes as they came: what unpacks could be of any size."""
    body = bytearray()
    async with http.stream("POST", request["url"], content=request["body"]) as response:
        async for piece in response.aiter_raw():
            body += piece
            if len(body) > MAX_ANSWER_BYTES:
                raise InvalidRequest(
                    f"{http.base_url} answers with more than {MAX_ANSWER_BYTES} bytes: see --url"
                )
    return response, body


async def _asked(http: httpx.AsyncClient, request: dict[str, Any]) -> tuple[httpx.Response, Any]:
    """Returns the answer and its body; a service that has no room, or is away, is waited for."""
    import httpx

    away = False
    while True:
        wait = WAIT_SECONDS
        try:
            response, body = await _post(http, request)
        except httpx.TransportError:
            if not away:
                typer.echo(
                    f"{request['custom_id']}: no answer from {http.base_url}; it is asked again", err=True
                )
            away = True
        else:
            if response.status_code in REFUSED:
                raise InvalidRequest(
                    f"{http.base_url} refuses the key ({response.status_code}): see --api-key"
                )
            if response.status_code not in LATER:
                try:
                    return response, json.loads(body)
                except (ValueError, RecursionError):
                    raise InvalidRequest(
                        f"{http.base_url} answered {response.status_code} with what is no JSON: see --url"
                    ) from None
            later = response.headers.get("retry-after", "")
            wait = min(float(later), MOST_WAIT_SECONDS) if later.isdecimal() else WAIT_SECONDS
        await asyncio.sleep(wait)
