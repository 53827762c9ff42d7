"""The page at /: its files, their headers, and what a browser is told not to do."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from outrider.store.memory import MemoryStore
from router.api.keys import Keys, keys_of
from router.api.page import FILES, FOLDER
from router.router import Router


def router(page: bool = True, keys: Keys | None = None) -> FastAPI:
    return Router(MemoryStore(), num_speculative_tokens=4, max_sessions=4, page=page, keys=keys).app


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with asking(router()) as client:
        yield client


def asking(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router")


async def test_every_file_is_sent_as_it_lies_there(client: httpx.AsyncClient) -> None:
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert {"/", "/page/page.css", "/page/main.js"} <= FILES.keys()
    for path in FILES:
        name = "index.html" if path == "/" else path.removeprefix("/page/")
        answer = await client.get(path)
        assert answer.status_code == 200 and answer.content == (FOLDER / name).read_bytes()
        assert answer.headers["content-type"].partition(";")[0] == kinds[name.rpartition(".")[2]]
        again = await client.get(path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert (await client.get("/page/other.js")).status_code == 404
    assert (await client.get("/page/..%2frouter.py")).status_code == 404


async def test_nothing_inline_and_nothing_from_elsewhere_runs(client: httpx.AsyncClient) -> None:
    for path, file in FILES.items():
        policy = (await client.get(path)).headers["content-security-policy"]
        assert (
            "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
        )
        text = file.content.decode()
        assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}
        if path == "/":
            assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]* src=)", text)


async def test_what_a_module_imports_is_there() -> None:
    for path, file in FILES.items():
        for name in re.findall(r'from "\./([\w.]+)"', file.content.decode()):
            assert f"/page/{name}" in FILES, (path, name)
    page = FILES["/"].content.decode()
    assert {f"/{name}" for name in re.findall(r'(?:src|href)="(page/[\w.]+)"', page)} <= FILES.keys()


async def test_it_is_not_there_where_it_is_not_wanted() -> None:
    async with asking(router(page=False)) as client:
        assert {(await client.get(path)).status_code for path in FILES} == {404}


async def test_it_needs_no_key_and_what_it_asks_for_does() -> None:
    async with asking(router(keys=keys_of(None, f"alice sha256:{'0' * 64}"))) as client:
        assert {(await client.get(path)).status_code for path in FILES} == {200}
        for path in ("/v1/models", "/v1/live"):
            assert (await client.get(path)).status_code == 401
