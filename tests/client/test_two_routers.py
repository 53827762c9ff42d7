"""outrider.client, two routers and a verifier, all real, over connections that break."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outrider.client import Client, Statistics
from router.router import Router
from tests.client.conftest import Between, ServeApp
from tests.in_process import Cluster
from tests.router.api.scripted import until
from tests.tiny_models import build

ANSWERS = 4
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 11},
    {
        "temperature": 0.8,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "seed": 12,
        "stop": ["zq", "\ufffd\ufffd\ufffd"],
    },
    {"temperature": 1.2, "top_k": 20, "seed": 13},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("two") / "target")


@pytest.fixture
async def urls(target: Path, serve_app: ServeApp) -> AsyncIterator[list[str]]:
    """Two routers that share a store, and the verifier in it."""
    async with Cluster(target) as cluster:
        first = cluster._router
        second = Router(first.store, num_speculative_tokens=4, max_sessions=256)
        await second.start()
        try:
            await until(second.sessions.ready)
            yield [await serve_app(router.app) for router in (first, second)]
        finally:
            await second.stop(0)


def asked(index: int) -> dict[str, Any]:
    sampling = SAMPLINGS[index % len(SAMPLINGS)]
    return {"prompt": [5 + index, 7, 9], "max_tokens": 80, "ignore_eos": True, **sampling}


def told(urls: list[str], index: int) -> tuple[str, Statistics]:
    with Client(urls, uniform=lambda low, high: 0.0) as client:
        *pieces, statistics = client.stream("/v1/completions", asked(index))
    assert isinstance(statistics, Statistics)
    return "".join(map(str, pieces)), statistics


async def test_every_answer_is_the_undisturbed_one(urls: list[str], between: Between) -> None:
    rng = random.Random(5)
    proxies, cut_urls = [], []
    for url in urls:
        proxy, cut_url = await between(url, lambda: rng.randrange(0, 6000))
        proxies.append(proxy)
        cut_urls.append(cut_url)
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(ANSWERS) as clients:  # not the loop's own, which the routers need

        async def ask(urls: list[str], index: int) -> tuple[str, Statistics]:
            return await loop.run_in_executor(clients, told, urls, index)

        together = await asyncio.gather(
            *(ask(cut_urls[:: 1 if index % 2 else -1], index) for index in range(ANSWERS))
        )
        cuts = [proxy.cuts for proxy in proxies]
        for index, (text, statistics) in enumerate(together):
            undisturbed, reference = await ask(urls, index)
            assert text == undisturbed
            assert statistics.completion_tokens == reference.completion_tokens
    assert min(cuts) > 4, "each router lost connections"
