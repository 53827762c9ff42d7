"""One request to a running server over the OpenAI-compatible HTTP API, streamed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from outrider.errors import InvalidRequest, OutriderError, Unavailable

CONNECT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Statistics:
    """What the final chunk of a stream tells, and how long the whole took."""

    completion_tokens: int
    seconds: float  # from sending the request to the last chunk
    acceptance_rate: float | None  # accepted over drafted tokens; None = nothing was drafted
    mean_accepted_length: float | None  # tokens a step, over the steps with drafts
    seed: int | None

    def __str__(self) -> str:
        parts = [
            f"{self.completion_tokens} tokens in {self.seconds:.2f} s",
            f"{self.completion_tokens / max(self.seconds, 1e-9):.1f} tokens/s",
        ]
        if self.acceptance_rate is not None and self.mean_accepted_length is not None:
            parts += [
                f"acceptance rate {self.acceptance_rate:.2f}",
                f"mean accepted length {self.mean_accepted_length:.2f}",
            ]
        else:
            parts.append("no drafts")
        if self.seed is not None:
            parts.append(f"seed {self.seed}")
        return ", ".join(parts)


class Client:
    """Talks to one server. Raises Unavailable where none answers, otherwise what the server says is wrong."""

    def __init__(self, url: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self._url = url.rstrip("/")
        self._clock = clock
        # No read limit: a long prompt takes what it takes. No proxy: the server is one's own.
        self._http = httpx.Client(timeout=httpx.Timeout(None, connect=CONNECT_SECONDS), trust_env=False)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()

    def stream(self, path: str, request: Mapping[str, object]) -> Iterator[str | Statistics]:
        """Posts to /v1/completions or /v1/chat/completions: pieces of text, then the statistics."""
        body = {**request, "stream": True, "stream_options": {"include_usage": True}}
        started = self._clock()
        last: dict[str, Any] = {}
        with self._answer(path, body) as response:
            for chunk in _events(response.iter_lines()):
                if "error" in chunk:
                    raise OutriderError(chunk["error"]["message"])
                last = chunk
                for choice in chunk["choices"]:
                    text = choice["text"] if "text" in choice else choice["delta"].get("content")
                    if text:
                        yield text
        if not last.get("usage"):
            raise Unavailable("the server ended the stream before the answer was complete")
        yield _statistics(last, self._clock() - started)

    @contextmanager
    def _answer(self, path: str, body: Mapping[str, object]) -> Iterator[httpx.Response]:
        """A response that is being read; what goes wrong with it becomes an OutriderError."""
        try:
            content = json.dumps(body, allow_nan=False)
        except ValueError:
            raise InvalidRequest("every number must be finite") from None
        headers = {"content-type": "application/json"}
        try:
            with self._http.stream("POST", self._url + path, content=content, headers=headers) as response:
                if response.status_code >= 400:
                    response.read()
                    raise InvalidRequest(_server_message(response))
                yield response
        except (httpx.UnsupportedProtocol, httpx.InvalidURL, httpx.ConnectError, httpx.ConnectTimeout):
            raise Unavailable(
                f"no server answers at {self._url}: start one with `outrider serve`, or name another by --url"
            ) from None
        except httpx.TransportError:
            raise Unavailable(f"the connection to {self._url} broke before the answer was complete") from None


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to its [DONE]."""
    for line in lines:
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)


def _server_message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code} {response.reason_phrase}; is it Outrider?"


def _statistics(chunk: Mapping[str, Any], seconds: float) -> Statistics:
    speculation = (chunk.get("metrics") or {}).get("speculative_decoding") or {}
    drafted = speculation.get("num_draft_tokens", 0) > 0
    return Statistics(
        completion_tokens=chunk["usage"]["completion_tokens"],
        seconds=seconds,
        acceptance_rate=speculation["draft_acceptance_rate"] if drafted else None,
        mean_accepted_length=speculation["mean_acceptance_length"] if drafted else None,
        seed=chunk.get("seed"),
    )
