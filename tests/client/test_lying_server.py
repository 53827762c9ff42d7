"""A server that is none, and says things without end: to ask it costs little, and ends in a sentence."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from outrider.client import Client, Statistics, connection, streamed
from outrider.client import live as live_module
from outrider.client.connection import http_client
from outrider.client.live import live
from outrider.errors import OutriderError, Unavailable
from outrider_cli.bench import http as bench_http
from outrider_cli.bench.client import Refused, Request, ServerClient
from outrider_cli.doctor.service import service

OK, WRONG = b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 400 Wrong\r\n"
PIECE = b"x" * 2**16
ON_THE_WAY = 32 * 2**20  # what a machine keeps of a connection that nobody reads
REQUEST = {"prompt": "x"}


class Liar:
    """Answers whatever it is asked with a head, and after it the same piece as long as anybody listens."""

    def __init__(self, head: bytes, piece: bytes) -> None:
        self.sent = 0  # bytes, of all answers
        self._said = head, piece
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        head, piece = self._said
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            try:
                with peer:
                    peer.recv(2**16)
                    peer.sendall(head + b"\r\n")
                    while piece:
                        peer.sendall(piece)
                        self.sent += len(piece)
                    while peer.recv(2**16):  # what is not read would end the connection before its answer
                        pass
            except OSError:
                continue  # it was left

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


Lies = Callable[..., Liar]


@pytest.fixture
def lies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lies]:
    monkeypatch.setattr(bench_http, "MOST_BYTES", 2**20)
    liars: list[Liar] = []

    def start(head: bytes, piece: bytes = PIECE) -> Liar:
        liars.append(Liar(head, piece))
        return liars[-1]

    yield start
    for liar in liars:
        liar.stop()


def generated(liar: Liar) -> None:
    with Client(liar.url, patience_seconds=0.0) as client:
        list(client.stream("/v1/completions", REQUEST))


def watched(liar: Liar) -> None:
    with http_client(None, None, 5.0) as http:
        next(live(http, liar.url))


@pytest.mark.parametrize("ask", [generated, watched])
def test_a_refusal_without_end_is_left(lies: Lies, ask: Callable[[Liar], None]) -> None:
    liar = lies(WRONG)
    with pytest.raises(Unavailable, match=r"broke"):
        ask(liar)
    assert liar.sent < connection.MOST_BYTES + ON_THE_WAY


def test_a_refusal_that_comes_drop_by_drop_is_left(lies: Lies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MOST_SECONDS", 0.0)
    with pytest.raises(Unavailable, match=r"broke"):
        watched(lies(WRONG, b"x"))


def test_a_live_service_that_only_says_that_it_is_there_is_left(
    lies: Lies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "UNTOLD_SECONDS", 0.0)
    with pytest.raises(Unavailable, match=r"broke"):
        watched(lies(OK, b": here\n\n"))


def test_a_stream_without_events_is_left(lies: Lies) -> None:
    liar = lies(OK)
    with pytest.raises(OutriderError, match="is no answer"):
        generated(liar)
    assert liar.sent < streamed.MOST_BYTES + ON_THE_WAY


@pytest.mark.parametrize("layers", [1, 2])
def test_nothing_is_unpacked(lies: Lies, layers: int) -> None:
    packed = bytes(64 * 2**20)
    for _ in range(layers):
        packed = gzip.compress(packed, 1)
    coding = b", ".join([b"gzip"] * layers)
    head = WRONG + b"content-encoding: %b\r\ncontent-length: %d\r\n\r\n%b" % (coding, len(packed), packed)
    with pytest.raises(OutriderError, match="is it Outrider"):
        generated(lies(head, b""))


@pytest.mark.parametrize("head", [OK, WRONG])
def test_doctor_says_so(lies: Lies, head: bytes) -> None:
    liar = lies(head)
    with http_client(None, None, 5.0) as http:
        (found,) = service(http, liar.url, time.time)
    assert not found.ok
    assert liar.sent < streamed.MOST_BYTES + ON_THE_WAY


@pytest.mark.parametrize(
    "head",
    [
        OK,
        WRONG,
        OK + b"content-length: 99999999999\r\n",
        OK + b"transfer-encoding: chunked\r\n\r\nfffffffff\r\n",
    ],
)
async def test_a_benchmark_of_it_is_left(lies: Lies, head: bytes) -> None:
    liar = lies(head)
    client = ServerClient(liar.url, None, {})
    for asked in (client.models(), client.ask(Request("x", 1, 0.0, 0))):
        with pytest.raises(Unavailable, match="broke"):
            await asked
    assert liar.sent < 2 * (2**20 + ON_THE_WAY)


async def test_what_is_nested_without_end_is_no_json(lies: Lies) -> None:
    deep = b"[" * 100_000
    told = b"content-length: %d\r\n\r\n%b" % (len(deep), deep)
    client = ServerClient(lies(OK + told, b"").url, None, {})
    with pytest.raises(OutriderError, match="lists no models"):
        await client.models()
    client = ServerClient(lies(WRONG + told, b"").url, None, {})
    with pytest.raises(Refused, match="is it OpenAI-compatible"):
        await client.ask(Request("x", 1, 0.0, 0))


@pytest.mark.parametrize(
    "told",
    [
        {"seed": "\x1b[2J"},
        {"usage": {"completion_tokens": 10**400}},
        {"choices": [{"index": 0, "text": "\ud800"}]},
    ],
)
def test_figures_and_texts_that_are_none_are_told_nobody(lies: Lies, told: dict[str, object]) -> None:
    chunk = {"choices": [{"index": 0, "text": "x"}], "usage": {"completion_tokens": 1}, "seed": 1, **told}
    event = (
        b"content-type: text/event-stream\r\n\r\ndata: %b\n\ndata: [DONE]\n\n" % json.dumps(chunk).encode()
    )
    with pytest.raises(OutriderError, match="is no answer"), Client(lies(OK + event, b"").url) as client:
        assert not any(isinstance(each, Statistics) for each in client.stream("/v1/completions", REQUEST))
