"""One request to a running service over the OpenAI-compatible HTTP API, streamed. It goes on whatever
breaks."""

from __future__ import annotations

import json
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from outrider.client.connection import (
    CONNECT_SECONDS,
    NOT_TRUSTED,
    STREAM,
    http_client,
    not_trusted,
    server_address,
)
from outrider.client.streamed import NO_ANSWER, Broken, StreamedAnswer, no_answer, server_sent_events
from outrider.errors import InvalidRequest, OutriderError, Unavailable

SILENCE_SECONDS = 10.0  # a router writes every 5 s, if only a sign of life, once it has read the prompt
PATIENCE_SECONDS = 60.0
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
DRAWN_SEEDS = 2**53  # JSON readers that hold numbers as doubles keep them whole
MOST_ENDED = 2  # routers in a row that ended while they had the request: it may be what they die of
FOR_NOW = frozenset({409, 429, 502, 503, 504})  # statuses after which one may come back
NOT_FOUND = 404
MOST = 10**15  # tokens that can be


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
    """Talks to the routers of one service; belongs to one thread."""

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        api_key: str | None = None,
        ca_file: Path | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """`urls` name routers that share a store; if one fails, the next is asked. `ca_file` holds the
        authority of their certificates; None means the public ones.

        `patience_seconds` is how long an answer may make no progress, attempts to go on included. A
        connection on which nothing came for `silence_seconds` counts as broken. Raises InvalidRequest for
        what is no address, and StartupError if the key or the file cannot be used.
        """
        self._urls = [server_address(url) for url in ([urls] if isinstance(urls, str) else urls)]
        self._at = 0  # index of the router in use
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._sleep = sleep
        self._uniform = uniform
        self._http = http_client(api_key, ca_file, silence_seconds)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()

    def stream(self, path: str, request: Mapping[str, object]) -> Iterator[str | Statistics]:
        """Posts to /v1/completions or /v1/chat/completions. Yields pieces of text, each once, then the
        statistics.

        After a broken connection, a lost router or a refusal for now, the next router is asked. An answer
        that has begun goes on after what is here. If nothing of it came, or the service has lost it, it is
        asked for again: that costs work and nothing else, because its seed makes it the same text. The seed
        is drawn here if the request has none.

        Raises InvalidRequest with the service's words. Raises Unavailable if the answer makes no progress for
        as long as the patience lasts, or at once if no router is there at all, or if two in a row ended while
        they had the request, which may be what they die of. Text that was yielded before
        stays valid.
        """
        body = _body(request)
        answer = StreamedAnswer()
        started = self._clock()
        trouble: _Trouble | None = None
        while not answer.done:
            try:
                with self._response(path, body, answer) as response:
                    for event in server_sent_events(response.iter_bytes()):
                        text = answer.read(event)
                        if text:
                            trouble = None
                            yield text
                if not answer.done:
                    raise Broken(self._broke(), cut=True)
            except Broken as broken:
                if answer.complete:
                    break
                trouble = trouble or _Trouble(since=self._clock())
                self._get_over(broken, trouble, answer)
        if not answer.complete:
            raise Unavailable("the server ended the stream before the answer was complete")
        yield _statistics(answer.last, self._clock() - started)

    def _get_over(self, broken: Broken, trouble: _Trouble, answer: StreamedAnswer) -> None:
        """Waits, and turns to the next router. Raises Unavailable if there is no hope."""
        trouble.failures += 1
        trouble.reached = trouble.reached or broken.reached or answer.begun
        if not trouble.reached and trouble.failures >= len(self._urls):
            raise Unavailable(
                f"no server answers at {' or '.join(self._urls)}: start one with `outrider serve`, "
                "or name another by --url"
            ) from None
        trouble.ended += broken.cut and self._ended()
        if trouble.ended >= MOST_ENDED:
            raise Unavailable(
                f"{trouble.ended} servers in a row ended when they were asked for this: "
                "it may be why, and is not sent to another"
            ) from None
        if answer.begun and answer.event_id is None:
            raise Unavailable(broken.message) from None  # not an answer that can go on, or be had again
        # "Full jitter": aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter
        longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0**trouble.failures)
        pause = broken.retry_after + self._uniform(0.0, longest)
        if self._clock() + pause - trouble.since > self._patience_seconds:
            raise Unavailable(broken.message) from None
        self._at = (self._at + 1) % len(self._urls)
        self._sleep(pause)

    @contextmanager
    def _response(self, path: str, body: str, answer: StreamedAnswer) -> Iterator[httpx.Response]:
        """Opens a response to read. What goes wrong with it becomes Broken or an OutriderError."""
        if answer.event_id is None:
            sent = {"content-type": "application/json"}
            url = self._url + path
            ask = self._http.stream("POST", url, content=body, headers=sent, extensions=STREAM)
        else:
            session, _, position = answer.event_id.partition(":")
            url = f"{self._url}/v1/sessions/{session}/events?after={position}"
            ask = self._http.stream("GET", url, extensions=STREAM)
        try:
            with ask as response:
                if response.status_code == NOT_FOUND and answer.event_id is not None:
                    answer.restart()
                    raise Broken("the service has lost the answer")
                if response.status_code >= 400:
                    response.read()
                    raise _refusal(response)
                yield response
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            if not_trusted(error):
                raise Unavailable(NOT_TRUSTED.format(self._url)) from None
            raise Broken(f"no server answers at {self._url}", reached=False) from None
        except (httpx.TransportError, httpx.DecodingError):
            raise Broken(self._broke(), cut=True) from None

    def _ended(self) -> bool:
        """Returns True if the router in use is not there any more, or hangs."""
        with suppress(httpx.TransportError):  # else something is there, on a bad line
            try:
                self._http.get(f"{self._url}/health", timeout=CONNECT_SECONDS)
            except (httpx.ConnectError, httpx.TimeoutException):
                return True
        return False

    @property
    def _url(self) -> str:
        return self._urls[self._at]

    def _broke(self) -> str:
        return f"the connection to {self._url} broke before the answer was complete"


@dataclass(slots=True)
class _Trouble:
    """The failures since the last piece of text."""

    since: float  # seconds of the clock
    failures: int = 0
    reached: bool = False  # a router was there
    ended: int = 0  # routers that were there, and were not after they had been asked


def _body(request: Mapping[str, object]) -> str:
    seed = secrets.randbelow(DRAWN_SEEDS) if request.get("seed") is None else request["seed"]
    try:
        return json.dumps(
            {**request, "seed": seed, "stream": True, "stream_options": {"include_usage": True}},
            allow_nan=False,
        )
    except ValueError:
        raise InvalidRequest("every number must be finite") from None


def _refusal(response: httpx.Response) -> Broken | OutriderError:
    try:
        message = str(response.json()["error"]["message"])
    except (*NO_ANSWER, RecursionError):
        message = f"the server answered {response.status_code} {response.reason_phrase}; is it Outrider?"
    if response.status_code in FOR_NOW:
        seconds = response.headers.get("retry-after", "")
        return Broken(message, retry_after=float(seconds) if seconds.isdecimal() else 0.0)
    return InvalidRequest(message)


def _statistics(chunk: Mapping[str, Any], seconds: float) -> Statistics:
    """Raises OutriderError if the chunk tells none."""
    try:
        speculation = (chunk.get("metrics") or {}).get("speculative_decoding") or {}
        drafted = speculation.get("num_draft_tokens", 0) > 0
        count = int(chunk["usage"]["completion_tokens"])
        if not 0 <= count < MOST:
            raise ValueError(count)
        return Statistics(
            completion_tokens=count,
            seconds=seconds,
            acceptance_rate=float(speculation["draft_acceptance_rate"]) if drafted else None,
            mean_accepted_length=float(speculation["mean_acceptance_length"]) if drafted else None,
            seed=None if chunk.get("seed") is None else int(chunk["seed"]),
        )
    except (*NO_ANSWER, OverflowError):
        raise no_answer() from None
