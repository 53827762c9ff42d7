"""Pages of other sites, where no keys are asked for."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httpx
import pytest
import uvicorn

from outrider.store.memory import MemoryStore
from router.api.keys import ApiKey, digest
from router.router import Router
from tests.router.api.scripted import until

CROSS_SITE = {"sec-fetch-site": "cross-site", "origin": "https://evil.example"}


async def answered(method: str, path: str, headers: dict[str, str], **options: Any) -> httpx.Response:
    """Asks a real router at the loopback address."""
    router = Router(MemoryStore(ttl_seconds=9), num_speculative_tokens=4, max_sessions=4, **options)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(router.app, log_level="critical", lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until(lambda: server.started)
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=60
        ) as http:
            return await http.request(
                method, path, headers=headers, content="{}" if method == "POST" else None
            )
    finally:
        server.should_exit = True
        await serving


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.x.y", "["]
)
async def test_a_name_of_another_site_that_means_this_machine(host: str) -> None:
    told = await answered("GET", "/v1/models", {"host": host})
    assert told.status_code == 403 and "its own names only" in told.json()["error"]["message"]


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "10.0.0.2:8000",
        "[::1]:80",
        "localhost:8000",
        "a.localhost.",
        "box",
        "host.docker.internal",
    ],
)
async def test_this_machines_own_names(host: str) -> None:
    assert (await answered("GET", "/v1/models", {"host": host})).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null"])
async def test_a_form_of_another_site(origin: str) -> None:
    told = await answered(
        "POST", "/v1/messages", {**CROSS_SITE, "origin": origin, "content-type": "text/plain"}
    )
    assert told.status_code == 403 and "--cors-origin" in told.json()["error"]["message"]


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://0.0.0.0:3000"])
@pytest.mark.parametrize("host", ["0.0.0.0:8000", "[::ffff:127.0.0.1]:8000", "box"])
async def test_a_form_of_another_site_to_an_address_of_which_browsers_tell_less(
    origin: str, host: str
) -> None:
    told = await answered("POST", "/v1/messages", {"origin": origin, "host": host})
    assert told.status_code == 403 and "--cors-origin" in told.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "options"),
    [
        ({"origin": "http://0.0.0.0:8000", "host": "0.0.0.0:8000"}, {}),  # the page of this service
        ({"origin": "http://localhost:3000", "sec-fetch-site": "same-site"}, {}),
        ({"origin": "vscode-file://vscode-app"}, {}),
        ({"origin": "https://evil.example", "sec-fetch-site": "same-origin"}, {}),  # a proxy has changed Host
        (CROSS_SITE, {"cors_origins": ["https://evil.example"]}),
        ({**CROSS_SITE, "host": "a.example"}, {"cors_origins": ["*"]}),
        ({}, {}),
    ],
)
async def test_who_is_let_in(headers: dict[str, str], options: dict[str, Any]) -> None:
    assert (await answered("POST", "/tokenize", headers, **options)).status_code not in (403, 401)


@pytest.mark.parametrize("headers", [CROSS_SITE, {"sec-fetch-site": "cross-site"}])
async def test_the_places_of_who_looks_at_the_live_service(headers: dict[str, str]) -> None:
    told = await answered("GET", "/v1/live", headers)
    assert told.status_code == 403 and "--cors-origin" in told.json()["error"]["message"]


async def test_a_link_to_the_page() -> None:
    assert (await answered("GET", "/", {"sec-fetch-site": "cross-site"})).status_code == 200


async def test_with_keys_any_name_will_do() -> None:
    keys = [ApiKey("alice", digest("key"))]
    told = await answered("GET", "/v1/models", {"host": "a.example", "x-api-key": "key"}, keys=lambda: keys)
    assert told.status_code == 200
