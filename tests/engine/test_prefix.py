"""A request that begins as an earlier one did runs only what is new of its prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from outrider.engine.engine import Step, Work
from outrider.sampling.params import SamplingParams
from router.api.access import Access, HttpAccess
from router.api.http import create_app
from router.api.intake import Intake
from router.api.keys import ApiKey, digest
from router.metrics import Metrics
from tests.in_process import Cluster
from tests.tiny_models import build

PREFIX, REST, BLOCK = 1000, 24, 16


async def test_a_shared_prefix_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(2)
    prefix, *rests = ([rng.randrange(1, 199) for _ in range(length)] for length in (PREFIX, REST, REST))
    ran: list[int] = []
    async with Cluster(build("llama", tmp_path, max_position_embeddings=2048), kv_blocks=200) as cluster:
        engine = cluster.verifier.stepper._engine
        prepare = engine.prepare

        def counting(works: Sequence[Work]) -> Step:
            ran.append(sum(len(work.tokens) for work in works))
            step: Step = prepare(works)
            return step

        monkeypatch.setattr(engine, "prepare", counting)
        tokens, cached = [], []
        for rest in rests:
            answer = await cluster.ask(prefix + rest, SamplingParams(temperature=0.0), 1)
            tokens.append(sum(ran))
            cached.append(answer.cached_prompt_tokens)
            ran.clear()
    shared = PREFIX // BLOCK * BLOCK
    assert cached == [0, shared]
    assert tokens == [PREFIX + REST, PREFIX + REST - shared]


async def test_what_another_salt_cached_is_read_again_and_the_text_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the verifier and by the drafter: neither tells one tenant of another's prompt."""
    rng, greedy = random.Random(3), SamplingParams(temperature=0.0)
    prompt = [rng.randrange(1, 199) for _ in range(100)]
    async with Cluster(build("llama", tmp_path / "m"), kv_blocks=100) as cluster:
        drafter = await cluster.add_drafter(build("llama", tmp_path / "m"))
        engine = cluster.verifier.stepper._engine
        prepare = engine.prepare

        def counting(works: Sequence[Work]) -> Step:
            ends = (min(work.start + len(work.tokens), len(prompt)) for work in works)
            read[-1] += sum(max(0, end - work.start) for end, work in zip(ends, works, strict=True))
            step: Step = prepare(works)
            return step

        monkeypatch.setattr(engine, "prepare", counting)
        answers, read = [], list[int]()
        for salt in (b"alice", b"bob", b"alice", b""):
            read.append(0)
            answers.append(await cluster.ask(prompt, greedy, 20, cache_salt=salt))
        pool = drafter.stepper._engine.pool
        drafted = [pool.cached(prompt, salt).tokens for salt in (b"alice", b"bob", b"", b"carol")]
    assert [answer.cached_prompt_tokens for answer in answers] == [0, 0, 96, 0]
    assert read == [100, 100, 4, 100], "a miss is computed, and takes its time"
    assert len({tuple(answer.tokens) for answer in answers}) == 1
    assert drafted == [96, 96, 96, 0]


async def test_cached_tokens_confirm_no_guess_of_another_key_s_prompt(tmp_path: Path) -> None:
    keys = [ApiKey(name, digest(name)) for name in ("alice", "bob")]
    secret = list(range(1, 101))
    async with Cluster(build("llama", tmp_path), kv_blocks=100) as cluster:

        async def cached(name: str, shared: bool = False, **fields: str) -> int:
            app = create_app(Intake(cluster.sessions, lambda _: 1, share_prefixes=shared), Metrics())
            app.add_middleware(HttpAccess, access=Access(lambda: keys, Metrics()))
            asked = {"prompt": secret, "max_tokens": 1, **fields}
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://r") as client:
                answer = await client.post(
                    "/v1/completions", json=asked, headers={"Authorization": f"Bearer {name}"}
                )
            found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found

        assert [await cached(name) for name in ("alice", "alice", "bob", "bob")] == [0, 96, 0, 96]
        assert [await cached(name, cache_salt="s") for name in ("alice", "alice", "bob")] == [0, 96, 0]
        assert [await cached(name, shared=True) for name in ("alice", "bob")] == [0, 96]
        assert await cached("bob", shared=True, cache_salt="s") == 0
