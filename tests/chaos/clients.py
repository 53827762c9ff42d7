"""The clients of a storm: so many streams at a time, each compared with its reference as it comes.

A stream that breaks off is resumed through the other router, from what its client has. A process of its own,
so that it has a host of its own: after SIGTERM it begins nothing new and ends with the streams that it has.

    python -m tests.chaos.clients OPTIONS.json RESULT.jsonl
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import httpx

from outrider.client import Client, Statistics
from outrider.errors import OutriderError
from outrider.net.rpc import channel
from outrider.v1 import generation_pb2, generation_pb2_grpc

NO_PROGRESS_SECONDS = 120.0  # without a token: the stream is given up, which is an error of the service
SILENCE_SECONDS = (
    10.0  # after which an HTTP client tries another router; a gRPC channel's own pings find out before
)
PAUSE_SECONDS = 0.3  # before another attempt
POLL_SECONDS = 0.05
RECORD_SECONDS = 0.02  # arrivals closer than that are one


class Broken(Exception):
    """The stream broke off, or cannot be had at the moment."""


class Lost(Exception):
    """The service says that it knows no such session."""


class Different(Exception):
    """What came is not what the target alone gives."""


@dataclass
class StormOptions:
    urls: list[str]
    grpc_addresses: list[str]
    cases: list[dict[str, Any]]  # references.Case
    streams: int  # at a time
    seed: int


@dataclass
class Record:
    """One stream from its first attempt to its end; times are time.monotonic()'s, in seconds."""

    client: str  # "grpc", "http", "python"
    case: int
    began: float
    ended: float = 0.0
    tokens: int = 0  # that came, each once, and equalled the reference
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens so far)
    routers: list[tuple[float, int]] = field(default_factory=list)  # (time, index) of each attempt
    resumptions: int = 0  # attempts that went on with a session
    repeats: int = 0  # attempts that had to send the request again: no id had come yet
    logs_lost: int = 0  # of those, because the service knew the session no more
    breaks: dict[str, int] = field(default_factory=dict)  # what ended attempts
    error: str | None = None  # None = it ended, and equal

    def arrived(self, tokens: int) -> None:
        if tokens > self.tokens:
            self.tokens = tokens
            self.moved()

    def moved(self) -> None:
        """Something new has come."""
        now = time.monotonic()
        if self.arrivals and now - self.arrivals[-1][0] < RECORD_SECONDS:
            self.arrivals[-1] = (self.arrivals[-1][0], self.tokens)
        else:
            self.arrivals.append((now, self.tokens))


class Stream:
    """What all clients have in common: attempts until the answer is whole."""

    client = ""

    def __init__(self, case: dict[str, Any], record: Record, routers: int, first: int) -> None:
        """`first`: the router of the first attempt."""
        self.case = case
        self.record = record
        self.id = ""  # of the session, as soon as it was told
        self._routers = routers
        self._first = first

    async def attempt(self, router: int) -> None:
        """Returns when the answer is whole. Raises Broken, Lost or Different."""
        raise NotImplementedError

    async def run(self) -> None:
        router = self._first
        record = self.record
        while True:
            record.routers.append((time.monotonic(), router))
            try:
                await self.attempt(router)
                record.ended = time.monotonic()
                return
            except Different as error:
                record.error = f"different: {error}"
                return
            except Lost:
                self.id = ""
                record.logs_lost += 1
                record.breaks["lost"] = record.breaks.get("lost", 0) + 1
            except Broken as error:
                reason = str(error)[:120]
                record.breaks[reason] = record.breaks.get(reason, 0) + 1
            last = record.arrivals[-1][0] if record.arrivals else record.began
            if time.monotonic() - last > NO_PROGRESS_SECONDS:
                record.error = f"no token for {NO_PROGRESS_SECONDS:g} s; {record.breaks}"
                return
            if self.id:
                record.resumptions += 1
            else:
                record.repeats += 1
            router = (router + 1) % self._routers
            await asyncio.sleep(PAUSE_SECONDS)

    def finish(self, tokens: int) -> None:
        """The service says that the answer is whole, and how many tokens it had."""
        expected = len(self.case["tokens"])
        if tokens != expected or self.record.tokens != expected:
            raise Different(f"{self.record.tokens} tokens came, {tokens} were told, {expected} expected")


class GrpcStream(Stream):
    client = "grpc"
    stubs: list[generation_pb2_grpc.GenerationStub]

    async def attempt(self, router: int) -> None:
        stub, at = self.stubs[router], self.record.tokens if self.id else 0
        if self.id:
            call = stub.Resume(generation_pb2.ResumeRequest(id=self.id, after=at))
        else:
            call = stub.Generate(self._request())
        try:
            async for response in call:
                match response.WhichOneof("event"):
                    case "started":
                        self.id = response.started.id
                    case "delta":
                        at = self._take(at, list(response.delta.token_ids))
                    case "completed":
                        self.finish(response.completed.usage.completion_tokens)
                        return
            raise Broken("the stream ended without completed")
        except grpc.aio.AioRpcError as error:
            raise _broken(error.code().name, error.details() or "") from None
        finally:
            call.cancel()

    def _take(self, at: int, tokens: list[int]) -> int:
        expected = self.case["tokens"][at : at + len(tokens)]
        if tokens != expected:
            raise Different(f"at {at} came {tokens}, expected {expected}")
        self.record.arrived(at + len(tokens))
        return at + len(tokens)

    def _request(self) -> generation_pb2.GenerateRequest:
        prompt = generation_pb2.TokenIds(ids=self.case["prompt"])
        return generation_pb2.GenerateRequest(token_ids=prompt, **_fields(self.case))


class HttpStream(Stream):
    """A stream of server-sent events, read as a browser's EventSource would; resumed by GET and by POST in
    turn."""

    client = "http"
    http: httpx.AsyncClient
    urls: list[str]

    def __init__(self, case: dict[str, Any], record: Record, routers: int, first: int) -> None:
        super().__init__(case, record, routers, first)
        self._text = ""
        self._last_id = ""

    async def attempt(self, router: int) -> None:
        url = self.urls[router]
        headers, body = {}, {"stream": True, "stream_options": {"include_usage": True}, **_fields(self.case)}
        body["prompt"] = self.case["prompt"]
        method, path = "POST", "/v1/completions"
        if not self.id:
            self._text = self._last_id = ""
        elif self.record.resumptions % 2:
            session, _, after = self._last_id.partition(":")
            method, path, body = "GET", f"/v1/sessions/{session}/events?after={after}", {}
        else:
            headers = {"Last-Event-ID": self._last_id}
        try:
            async with self.http.stream(method, url + path, json=body or None, headers=headers) as response:
                if response.status_code >= 400:
                    raise _broken(
                        str(response.status_code), (await response.aread()).decode(errors="replace")
                    )
                await self._read(response)
        except httpx.TransportError as error:
            raise Broken(type(error).__name__) from None

    async def _read(self, response: httpx.Response) -> None:
        tokens = 0
        async for line in response.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                self._last_id = self.id = value
            elif name == "data" and value == "[DONE]":
                self.record.arrived(tokens)
                self.finish(tokens)
                if self._text != self.case["text"]:
                    raise Different(f"the text has {len(self._text)} characters of {len(self.case['text'])}")
                return
            elif name == "data":
                tokens = self._take(json.loads(value)) or tokens
        raise Broken("the stream ended without [DONE]")

    def _take(self, chunk: dict[str, Any]) -> int:
        """The tokens of the whole answer, where the chunk tells them."""
        if "error" in chunk:
            raise _broken(chunk["error"]["type"], chunk["error"]["message"])
        for choice in chunk["choices"]:
            self._text += choice["text"]
        if not self.case["text"].startswith(self._text):
            raise Different(f"after {self.record.tokens} tokens: {self._text[-80:]!r}")
        after = self._last_id.rpartition(":")[2]
        if after:
            self.record.arrived(min(int(after), len(self.case["tokens"])))  # the end counts as one token
        return int((chunk.get("usage") or {}).get("completion_tokens", 0))


class PythonStream(Stream):
    """outrider.client, which resumes by itself: what it raises is an error of the service's."""

    client = "python"
    urls: list[str]
    threads: ThreadPoolExecutor

    async def attempt(self, router: int) -> None:
        urls = [*self.urls[router:], *self.urls[:router]]
        try:
            await asyncio.get_running_loop().run_in_executor(self.threads, self._ask, urls)
        except OutriderError as error:
            raise Different(f"the client gave up: {error}") from None

    def _ask(self, urls: list[str]) -> None:
        text = ""
        request = {"prompt": self.case["prompt"], **_fields(self.case)}
        with Client(urls, patience_seconds=NO_PROGRESS_SECONDS, silence_seconds=SILENCE_SECONDS) as client:
            for piece in client.stream("/v1/completions", request):
                if isinstance(piece, Statistics):
                    self.record.arrived(piece.completion_tokens)
                    self.finish(piece.completion_tokens)
                    break
                text += piece
                self.record.moved()
                if not self.case["text"].startswith(text):
                    raise Different(f"after {len(text)} characters: {text[-80:]!r}")
        if text != self.case["text"]:
            raise Different(f"the text has {len(text)} characters of {len(self.case['text'])}")


def _broken(code: str, message: str) -> Exception:
    if code in ("NOT_FOUND", "404", "not_found_error"):
        return Lost(message)
    if code in (
        "INVALID_ARGUMENT",
        "INTERNAL",
        "UNKNOWN",
        "400",
        "500",
        "internal_error",
        "invalid_request_error",
    ):
        return Different(f"{code}: {message}")
    return Broken(f"{code}: {message}")


def _fields(case: dict[str, Any]) -> dict[str, Any]:
    fields = {**case["sampling"], "max_tokens": len(case["tokens"]), "ignore_eos": True}
    if case["num_speculative_tokens"] is not None:
        fields["num_speculative_tokens"] = case["num_speculative_tokens"]
    return fields


KINDS: tuple[type[Stream], ...] = (GrpcStream, HttpStream, GrpcStream, HttpStream, PythonStream)


async def storm(options: StormOptions, stop: asyncio.Event) -> list[Record]:
    """Streams until `stop`, and those begun to their ends."""
    records: list[Record] = []
    GrpcStream.stubs = [
        generation_pb2_grpc.GenerationStub(channel(address)) for address in options.grpc_addresses
    ]
    HttpStream.urls = PythonStream.urls = options.urls
    PythonStream.threads = ThreadPoolExecutor(options.streams)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    timeout = httpx.Timeout(SILENCE_SECONDS, connect=3.0)
    async with httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as HttpStream.http:

        async def client(number: int) -> None:
            rng = random.Random(options.seed * 1000 + number)
            kind, routers = KINDS[number % len(KINDS)], len(options.urls)
            while not stop.is_set():
                index = rng.randrange(len(options.cases))
                record = Record(kind.client, index, time.monotonic())
                records.append(record)
                try:
                    # Each router has its share at any time, so that its death reaches some.
                    await kind(options.cases[index], record, routers, number % routers).run()
                except Exception as error:
                    record.error = f"the client failed: {error!r}"
                record.ended = record.ended or time.monotonic()

        async def tell() -> None:
            """Says so once something of each stream has come, or it has failed."""
            while not records or not all(record.arrivals or record.ended for record in records):  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)
            print("streams flow", flush=True)

        await asyncio.gather(tell(), *(client(number) for number in range(options.streams)))
    return records


async def main(options_file: str, result_file: str) -> None:
    options = StormOptions(**json.loads(Path(options_file).read_text()))  # noqa: ASYNC240
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    records = await storm(options, stop)
    lines = "".join(json.dumps(asdict(record)) + "\n" for record in records)
    Path(result_file).write_text(lines)  # noqa: ASYNC240


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
