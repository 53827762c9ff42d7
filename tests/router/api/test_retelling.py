"""An answer that is told again from its log costs a place before the log is read, and no time of the loop."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import grpc
import httpx
import pytest

from outrider.errors import Overloaded, UnknownSession
from outrider.v1 import generation_pb2, generation_pb2_grpc
from outrider.wire.session import SessionId
from router import stop
from router.api import record
from router.api import threads as threads_module
from router.api.access import Access, HttpAccess
from router.api.generate import generate_all
from router.api.http import create_app
from router.api.intake import Intake
from router.api.keys import ApiKey
from router.api.threads import RETOLD_TOKENS, Threads
from router.metrics import Metrics
from router.requests import Recalled, SessionBegun
from tests.router.api.scripted import ScriptedRunner, byte_level, served, steps, until
from tests.router.api.test_grpc import Connect, connect  # noqa: F401 (a fixture)

TOKENIZER = byte_level()
MODEL = served(TOKENIZER, max_context=2048)
IDS = TOKENIZER.encode("the quick brown fox " * 60, add_special_tokens=False).ids
ASK = {"prompt": "the fox", "max_tokens": 1500, "stream": True, "stop": ["zebra", "foxy", "q" * 200]}
ClientOf = Callable[..., httpx.AsyncClient]


class SlowLogs(ScriptedRunner):
    """Its logs are not read before `go_on`."""

    def __init__(self) -> None:
        super().__init__(MODEL, lambda request: steps(IDS, 3))
        self.reads = 0

    async def recall(self, session_id: SessionId) -> Recalled:
        self.reads += 1
        await self.go_on.wait()
        return await super().recall(session_id)


def id_in(events: str) -> str:
    return events.partition('"id":"cmpl-')[2][:32]


async def test_one_too_many_is_refused_before_its_log_is_read(
    client_of: ClientOf,
    connect: Connect,  # noqa: F811
) -> None:
    runner, threads = SlowLogs(), Threads(retold_places=2)
    client = client_of(runner, threads=threads)
    whole = (await client.post("/v1/completions", json=ASK)).text
    path = f"/v1/sessions/{id_in(whole)}/events"
    waiting = [asyncio.create_task(client.get(path, params={"after": after})) for after in ("0", "90")]
    await until(lambda: runner.reads == 2)
    for _ in range(100):
        refused = await client.get(path)
        assert refused.status_code == 429 and refused.headers["retry-after"]
    stub = generation_pb2_grpc.GenerationStub(await connect(runner, threads=threads))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        [one async for one in stub.Resume(generation_pb2.ResumeRequest(id=id_in(whole)))]
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert runner.reads == 2
    runner.go_on.set()
    all_of_it, rest = await asyncio.gather(*waiting)
    assert all_of_it.text == whole and whole.endswith(rest.text)
    assert (await client.get(path)).text == whole, "places are given back"


async def test_one_keys_owner_has_half_of_the_places(metrics: Metrics) -> None:
    runner = SlowLogs()
    keys = [ApiKey(name, hashlib.sha256(name.encode()).digest()) for name in ("ann", "bob")]
    app = create_app(Intake(runner, lambda limit: 0, threads=Threads(retold_places=4)), metrics)
    app.add_middleware(HttpAccess, access=Access(lambda: keys, metrics))
    ann, bob = ({"authorization": f"Bearer {name}"} for name in ("ann", "bob"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        whole = (await client.post("/v1/completions", json=ASK, headers=ann)).text
        path = f"/v1/sessions/{id_in(whole)}/events"
        waiting = [asyncio.create_task(client.get(path, headers=ann)) for _ in range(2)]
        await until(lambda: runner.reads == 2)
        assert (await client.get(path, headers=ann)).status_code == 429
        waiting.append(asyncio.create_task(client.get(path, headers=bob)))
        await until(lambda: runner.reads == 3)
        runner.go_on.set()
        assert [one.status_code for one in await asyncio.gather(*waiting)] == [200, 200, 404]


async def test_of_long_prompts_no_more_are_held_than_may_be(
    client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 128 answers has a log, with the prompt: twelve clients that asked for them had taken 534 MB."""
    runner = SlowLogs()
    client = client_of(runner)
    ask = {**ASK, "prompt": [[5] * 20, [5] * 30], "n": 2}
    whole = (await client.post("/v1/completions", json=ask)).text
    monkeypatch.setattr(threads_module, "RETOLD_TOKENS", 150 + 4 * len(IDS))
    path = f"/v1/sessions/{id_in(whole)}/events"
    waiting = [asyncio.create_task(client.get(path)) for _ in range(3)]
    await until(lambda: runner.reads == 3)
    runner.go_on.set()
    assert [one.status_code for one in await asyncio.gather(*waiting)] == [200, 429, 429]
    monkeypatch.setattr(threads_module, "RETOLD_TOKENS", 10)
    assert (await client.get(path)).status_code == 200, "one is told again however long it is"


def test_one_keys_owner_holds_half_of_the_tokens() -> None:
    threads = Threads()
    with (
        threads.retelling("ann") as first,
        threads.retelling("ann") as second,
        threads.retelling("bob") as bob,
    ):
        first.hold(RETOLD_TOKENS // 2 - 1)
        second.hold(1)
        with pytest.raises(Overloaded):
            second.hold(1)
        bob.hold(RETOLD_TOKENS)  # the first of an owner's
        first.release()
        second.hold(0)
    with threads.retelling("ann") as first, threads.retelling("bob") as bob:
        first.hold(RETOLD_TOKENS)
        first.hold(1)
        bob.hold(1)
    assert not threads._held


@pytest.mark.parametrize("over", [True, False])
async def test_who_is_told_of_a_log_alone_holds_it_to_the_end(
    client_of: ClientOf, metrics: Metrics, over: bool
) -> None:
    runner, threads = ScriptedRunner(MODEL, lambda _: [*steps(IDS, 3)[:-1], None, steps([5])[-1]]), Threads()
    asked = asyncio.create_task(client_of(runner).post("/v1/completions", json={**ASK, "prompt": [5] * 20}))
    if over:
        runner.go_on.set()
        await asked
    await runner.waiting.wait()
    (session_id,) = runner.logs
    with threads.retelling("") as place:
        _, generation = await record.recalled(runner, session_id, place)
        known = 20 + len(IDS)
        assert threads._held.total() == known
        items = generate_all(
            lambda _: runner.resume(session_id), runner.together, generation, metrics, [0], place
        )
        async with aclosing(items):
            async for _, item in items:
                if not isinstance(item, SessionBegun):
                    break
            assert threads._held.total() == (known if over else 0)
    assert not threads._held
    runner.go_on.set()
    await asked


async def test_a_cancel_reads_a_log_in_a_place_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands, of 60 bytes each, had waited for one thread with as many logs."""
    runner, threads, id = SlowLogs(), Threads(retold_places=4), SessionId(b"x" * 16)
    monkeypatch.setattr(record, "owner", lambda: "ann")
    waiting = [asyncio.create_task(record.sessions_of(runner, id, threads)) for _ in range(2)]
    await until(lambda: runner.reads == 2)
    with pytest.raises(Overloaded):
        await record.sessions_of(runner, id, threads)
    assert runner.reads == 2
    runner.go_on.set()
    for one in waiting:
        with pytest.raises(UnknownSession):
            await one


async def test_who_leaves_while_the_log_is_read_gives_the_place_back(client_of: ClientOf) -> None:
    runner = SlowLogs()
    client = client_of(runner, threads=Threads(retold_places=1))
    whole = (await client.post("/v1/completions", json=ASK)).text
    path = f"/v1/sessions/{id_in(whole)}/events"
    for reads in (1, 2, 3):
        leaving = asyncio.create_task(client.get(path))
        await until(lambda expected=reads: runner.reads == expected)  # type: ignore[misc]
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    runner.go_on.set()
    assert (await client.get(path)).text == whole


@pytest.mark.parametrize("after", [0, 400])
async def test_its_text_is_made_beside_the_loop_and_its_tables_once(
    client_of: ClientOf, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    client = client_of(ScriptedRunner(MODEL, lambda request: steps(IDS, 3)))
    whole = (await client.post("/v1/completions", json=ASK)).text
    path = f"/v1/sessions/{id_in(whole)}/events"
    record._stop_strings.cache_clear()
    pushes: list[int] = []
    tables: list[str] = []
    push, table = stop.StopMatcher.push, stop._Table.__init__

    def noted_push(self: Any, text: str, may_stop: bool = True) -> str:
        pushes.append(threading.get_ident())
        return push(self, text, may_stop)

    def noted_table(self: Any, string: str) -> None:
        tables.append(string)
        assert threading.current_thread() is not threading.main_thread()
        table(self, string)

    monkeypatch.setattr(stop.StopMatcher, "push", noted_push)
    monkeypatch.setattr(stop._Table, "__init__", noted_table)
    for _ in range(3):
        assert whole.endswith((await client.get(path, params={"after": str(after)})).text)
    assert sorted(tables) == sorted(ASK["stop"])  # type: ignore[arg-type]
    assert len(pushes) > 3 * len(IDS)
    assert pushes.count(threading.main_thread().ident or 0) == 3, "of each the end alone: what is still open"
