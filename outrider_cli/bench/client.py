"""The client that measures: streams of an OpenAI-compatible server, each token's arrival noted."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from outrider.client.connection import server_address
from outrider.errors import InvalidRequest, OutriderError, Unavailable
from outrider_cli.bench.http import Http
from outrider_cli.bench.suite import Conversation, messages


class Refused(InvalidRequest):
    """A server's answer was not 200."""

    def __init__(self, message: str, status: int, retry_after: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after  # the header of that name


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked. The seed is the prompt's own, so that every way of serving draws the same tokens."""

    prompt: str | Conversation  # a text to go on with, or a conversation to answer
    max_tokens: int
    temperature: float
    seed: int


@dataclass(slots=True)
class Reply:
    """What came back, and when: seconds of time.perf_counter, which all processes of a machine share."""

    sent: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (when, tokens), in order
    text: str = ""
    prompt_tokens: int = 0
    drafted: int = 0  # draft tokens verified, as far as the server tells
    accepted: int = 0  # of them
    speculative_steps: int = 0  # that verified any
    ended: float = 0.0
    cpu_seconds: float | None = None  # from the first token to the last; None = not told with the reply

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.arrivals)


Came = Callable[[float, int | None], None]
"""Hears of each piece of text as it comes: when, and its tokens; None = the server does not tell."""


class ServerClient:
    """Asks one server. Raises Unavailable if none answers, otherwise what the server says is wrong."""

    def __init__(self, url: str, model: str | None, extras: Mapping[str, object]) -> None:
        """Connects to nothing yet. `extras` are fields beyond OpenAI's own that this server takes."""
        self.url = server_address(url)
        self._model = {} if model is None else {"model": model}
        self._extras = extras
        self._http = Http(self.url)

    async def close(self) -> None:
        await self._http.close()

    async def ask(self, request: Request, came: Came | None = None) -> Reply:
        path, asked = _asked(request.prompt)
        body = {
            **self._model,
            **self._extras,
            **asked,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "stream": True,
        }
        reply = Reply(sent=time.perf_counter())
        pieces: list[tuple[float, str, int | None]] = []  # (when, text, tokens so far if told)
        before = 0
        last: dict[str, Any] = {}
        async for chunk in self._events(path, body):
            if "error" in chunk:
                raise OutriderError(str(chunk["error"].get("message", chunk["error"])))
            last = chunk if chunk.get("usage") else last
            text = "".join(_text(choice) for choice in chunk["choices"])
            if text:
                now, so_far = time.perf_counter(), (chunk.get("usage") or {}).get("completion_tokens")
                pieces.append((now, text, so_far))
                if came is not None:
                    came(now, None if so_far is None else so_far - before)
                before = so_far or 0
        if not pieces:
            raise Unavailable(f"{self.url} ended an answer before its first token")
        reply.ended = time.perf_counter()
        reply.text = "".join(text for _, text, _ in pieces)
        usage = last.get("usage") or {}
        reply.prompt_tokens = usage.get("prompt_tokens", 0)
        reply.arrivals = count_tokens(pieces, usage.get("completion_tokens"))
        told = (last.get("metrics") or {}).get("speculative_decoding") or {}
        reply.drafted = told.get("num_draft_tokens", 0)
        reply.accepted = told.get("num_accepted_draft_tokens", 0)
        reply.speculative_steps = told.get("num_spec_steps", 0)
        return reply

    async def models(self) -> list[str]:
        """Returns the names of the models that it serves."""
        try:
            return [str(model["id"]) for model in json.loads(await self._got("/v1/models"))["data"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InvalidRequest(f"{self.url} lists no models: name one with --model") from None

    async def counted(self, name: str) -> float:
        """Returns a counter of its /metrics, over all labels. 0 if there is none of that name."""
        return await self.gauge(f"{name}_total")

    async def gauge(self, name: str) -> float:
        """Returns a gauge of its /metrics, as counted."""
        families = text_string_to_metric_families((await self._got("/metrics")).decode())
        samples = (sample for family in families for sample in family.samples)
        return sum(sample.value for sample in samples if sample.name == name)

    async def _got(self, path: str) -> bytes:
        async with self._http.asked("GET", path) as response:
            return await response.read()

    async def _events(self, path: str, body: Mapping[str, object]) -> AsyncIterator[dict[str, Any]]:
        """Yields the JSON objects of the answer, up to its [DONE]."""
        async with self._http.asked("POST", path, json.dumps(body).encode()) as response:
            if response.status >= 400:
                sentence = _message(response.status, await response.read())
                raise Refused(sentence, response.status, response.headers.get("retry-after"))
            try:
                async for line in response.lines():
                    if line.startswith(b"data:") and not line.endswith(b"[DONE]"):
                        yield json.loads(line[5:])
            except (ValueError, RecursionError):
                raise Unavailable(
                    f"{self.url} answered with what is no JSON: is it OpenAI-compatible?"
                ) from None


def _asked(prompt: str | Conversation) -> tuple[str, dict[str, object]]:
    """Returns the path of the API, and the field that holds the prompt."""
    if isinstance(prompt, str):
        return "/v1/completions", {"prompt": prompt}
    return "/v1/chat/completions", {"messages": messages(prompt)}


def _text(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning") or ""


def count_tokens(pieces: list[tuple[float, str, int | None]], total: int | None) -> list[tuple[float, int]]:
    """Returns (when, tokens) of each piece of text.

    Tokens as the server tells with each piece; otherwise its total, divided by length of text, since a piece
    may hold several tokens; if it tells nothing, one a piece."""
    if all(so_far is not None for _, _, so_far in pieces):
        counts = [so_far or 0 for _, _, so_far in pieces]
    elif total is not None:
        lengths = [len(text) for _, text, _ in pieces]
        counts = [round(total * sum(lengths[: end + 1]) / sum(lengths)) for end in range(len(lengths))]
    else:
        counts = list(range(1, len(pieces) + 1))
    before = [0, *counts]
    return [(piece[0], after - start) for piece, start, after in zip(pieces, before, counts, strict=False)]


def _message(status: int, body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"the server answered {status}; is it OpenAI-compatible?"
