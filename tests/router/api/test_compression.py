"""Whole answers come in brotli or gzip where they are asked for so; streams never do."""

from __future__ import annotations

import gzip
import threading

import brotli
import httpx
import pytest
from starlette.types import Receive, Scope, Send

from router.api import compression
from router.api.compression import Compression
from router.api.http import create_app
from router.api.intake import Intake
from router.metrics import Metrics
from tests.router.api.scripted import ScriptedRunner, byte_level, served, steps

TOKENIZER = byte_level()
IDS = TOKENIZER.encode("the fox " * 400, add_special_tokens=False).ids
ASKED = {"prompt": "x", "max_tokens": len(IDS), "seed": 1}
GZIP = {"accept-encoding": "gzip"}
BOTH = {"accept-encoding": "gzip, deflate, br"}


def made() -> httpx.AsyncClient:
    runner = ScriptedRunner(served(TOKENIZER, max_context=8192), lambda request: steps(IDS, 4))
    app = create_app(Intake(runner, lambda limit: 0), Metrics())
    app.add_middleware(Compression)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router")


@pytest.fixture
def client() -> httpx.AsyncClient:
    return made()


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("gzip", "gzip"),
        ("br", "br"),
        ("gzip, deflate, br", "br"),
        ("br;q=0.4, GZIP;q=0.5", "gzip"),
        ("br;q=0, gzip", "gzip"),
        ("gzip;q=0, br;q=0.000", None),
        ("br;q=what, gzip;q=0.5", "br"),
        ("gzip;q=nan", "gzip"),
        ("identity", None),
        ("x," * 15 + "gzip", "gzip"),
        ("x," * 16 + "gzip", None),  # as many are looked at
    ],
)
async def test_a_whole_answer(client: httpx.AsyncClient, accepted: str, encoding: str | None) -> None:
    response = await client.post("/v1/completions", json=ASKED, headers={"accept-encoding": accepted})
    assert response.headers.get("content-encoding") == encoding
    assert response.json()["choices"][0]["text"] == "the fox " * 400
    assert (int(response.headers["content-length"]) < 1000) is (encoding is not None)


async def test_without_its_package_brotli_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "brotli", None)
    client = made()
    for accepted, encoding in (("br", None), ("br, gzip;q=0.1", "gzip")):
        response = await client.post("/v1/completions", json=ASKED, headers={"accept-encoding": accepted})
        assert response.headers.get("content-encoding") == encoding
        assert response.json()["choices"][0]["text"] == "the fox " * 400


async def test_brotli_is_what_it_says(client: httpx.AsyncClient) -> None:
    async with client.stream("GET", "/openapi.json", headers=BOTH) as response:
        raw = b"".join([part async for part in response.aiter_raw()])
    assert response.headers["vary"] == "Accept-Encoding"
    assert (
        brotli.decompress(raw) == (await client.get("/openapi.json", headers={"accept-encoding": ""})).content
    )


async def test_a_stream_is_not_held_back(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={**ASKED, "stream": True}, headers=BOTH)
    assert "content-encoding" not in response.headers and response.text.endswith("data: [DONE]\n\n")

    async def parts(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for more in (True, False):
            await send({"type": "http.response.body", "body": b"x" * 5000, "more_body": more})

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(Compression(parts)), base_url="http://x"
    ) as large:
        response = await large.get("/", headers=BOTH)
    assert "content-encoding" not in response.headers and response.content == b"x" * 10_000


async def test_small_answers_come_as_they_are(client: httpx.AsyncClient) -> None:
    assert "content-encoding" not in (await client.get("/version", headers=GZIP)).headers


async def test_a_large_answer_is_compressed_beside_the_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers: list[int] = []

    class Noted:
        @staticmethod
        def compress(body: bytes, level: int) -> bytes:
            workers.append(threading.get_ident())
            return gzip.compress(body, level)

    monkeypatch.setattr(compression, "gzip", Noted)
    assert len((await client.get("/openapi.json", headers=GZIP)).content) > compression.INLINE_BYTES
    assert len(workers) == 1 and threading.get_ident() not in workers
