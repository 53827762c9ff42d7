"""What only a Redis can do: go away, come back without its memory, refuse, be reached by TLS."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import pytest

from outrider.errors import StartupError, Unavailable
from outrider.store.logs import Append, Owner
from outrider.store.redis import RedisStore
from outrider.store.store import Answer
from outrider.store.url import parse_store_url
from outrider.wire.description import WorkerRecord
from outrider.wire.hello import Role, WorkerKey
from outrider.wire.session import SessionId
from outrider.worker.registration import register
from tests.redis_server import PASSWORD, QUOTED_PASSWORD, RedisServer, TlsTerminator

Record = Callable[..., WorkerRecord]
TTL_SECONDS = 3.0  # less, and a busy machine lets a record expire that is renewed


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """One of the test's own, to be maltreated."""
    with RedisServer() as server:
        yield server


@pytest.fixture
async def store(redis: RedisServer, ttl_seconds: float) -> AsyncIterator[RedisStore]:
    made = RedisStore(parse_store_url(redis.url), ttl_seconds)
    yield made
    await made.close()


def ids(records: Mapping[WorkerKey, WorkerRecord]) -> set[str]:
    return {worker_id for _, worker_id in records}


async def until_away(store: RedisStore) -> None:
    while True:
        try:
            await store.logs.append((), 60)
        except Unavailable:
            return


async def until_back(store: RedisStore) -> None:
    while True:
        try:
            await store.logs.append((), 60)
            return
        except Unavailable:
            await asyncio.sleep(0.01)


async def kill(redis: RedisServer, store: RedisStore) -> None:
    """Dies, and comes back with no memory."""
    redis.kill()
    await until_away(store)
    redis.start()


async def hang(redis: RedisServer, store: RedisStore) -> None:
    """Hangs until every record has expired."""
    redis.signal(signal.SIGSTOP)
    expired = time.monotonic() + TTL_SECONDS
    while time.monotonic() < expired:
        await until_away(store)
    redis.signal(signal.SIGCONT)


async def forget(redis: RedisServer, store: RedisStore) -> None:
    """Dies and comes back so quickly that nobody's call fails."""
    await store._redis.flushall()


@pytest.mark.parametrize("go_away", [kill, hang, forget])
@pytest.mark.parametrize("ttl_seconds", [TTL_SECONDS])
async def test_nobody_is_dropped_because_the_redis_was_away(
    redis: RedisServer, store: RedisStore, record: Record, go_away: Any
) -> None:
    watcher = RedisStore(parse_store_url(redis.url), TTL_SECONDS)
    said = watcher.workers()
    await store.beat(record("stays"))
    await store.beat(record("goes"))
    while ids(await anext(said)) != {"stays", "goes"}:
        pass
    heard = asyncio.ensure_future(anext(said))
    await go_away(redis, store)
    await until_back(store)
    await store.beat(record("new"))
    assert ids(await heard) == {"stays", "goes", "new"}
    gone = asyncio.ensure_future(anext(said))
    while not gone.done():
        await store.beat(record("stays"))
        await store.beat(record("new"))
        await asyncio.wait((gone,), timeout=TTL_SECONDS / 10)
    assert ids(gone.result()) == {"stays", "new"}  # the other has not come back with the Redis
    await said.aclose()
    await watcher.close()


async def test_its_absence_and_return_are_logged_once(
    redis: RedisServer, store: RedisStore, record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="outrider")
    redis.kill()
    said = store.workers()
    first = asyncio.ensure_future(anext(said))
    other = RedisStore(parse_store_url(redis.url))
    for _ in range(5):
        await until_away(other)
        await asyncio.sleep(0.1)
    assert not first.done()
    redis.start()
    assert await first == {}
    away, back = [message for message in caplog.messages if "store" in message]
    assert away.startswith("the store cannot be reached at the moment (ConnectionError); going on with")
    assert back == "the store is back"
    await said.aclose()
    await other.close()


async def test_a_worker_registers_when_the_redis_comes_and_says_once_why_not(
    redis: RedisServer, store: RedisStore, record: Record
) -> None:
    redis.kill()
    states: asyncio.Queue[tuple[str | None, str]] = asyncio.Queue()
    registering = asyncio.create_task(
        register(store, record, on_state=lambda *state: states.put_nowait(state))
    )
    router = RedisStore(parse_store_url(redis.url))
    for name in ("r1", "r2"):  # the second after the Redis was away again
        assert await states.get() == (None, "the store cannot be reached at the moment (ConnectionError)")
        redis.start()
        await until_back(router)
        while (Role.VERIFIER, "v") not in await anext(router.workers()):
            pass
        await router.answer(record().info.identity, name, None)
        assert await states.get() == (name, "registered")
        redis.kill()
    registering.cancel()
    await asyncio.gather(registering, return_exceptions=True)
    assert states.empty() or await states.get() == (
        None,
        "the store cannot be reached at the moment (ConnectionError)",
    )
    await router.close()


async def test_a_worker_that_stops_leaves(redis: RedisServer, record: Record) -> None:
    store = RedisStore(parse_store_url(redis.url), ttl_seconds=1000)
    registering = asyncio.create_task(register(store, record))
    said = store.workers()
    while (Role.VERIFIER, "v") not in await anext(said):
        pass
    registering.cancel()
    assert await anext(said) == {}
    await said.aclose()
    await store.close()


async def test_what_is_not_understood_is_passed_over(store: RedisStore, record: Record) -> None:
    await store.beat(record())
    await store._redis.zadd("outrider:workers", {"verifier:nonsense": 1, "verifier:router": 2})
    await store._redis.hset("outrider:worker:verifier:nonsense", "record", b"\xff\xff")
    await store._redis.hset("outrider:worker:verifier:router", "record", b"")
    assert ids(await anext(store.workers())) == {"v"}


async def test_what_is_damaged_stands_in_nobodys_way(store: RedisStore, record: Record) -> None:
    """Neither in that of the worker whose record or word it is, nor in that of who looks for others."""
    key, name = "outrider:worker:verifier:v", "outrider:workers"
    await store._redis.zadd(name, {"verifier:v": 1, "verifier:w": 2})
    await store._redis.set(key, "no hash")
    await store._redis.set("outrider:worker:verifier:w", "no hash")
    assert ids(await anext(store.workers())) == set()
    await store.beat(record())
    await store._redis.hset(key, mapping={"word:a": "7", "word:b": "soon [null, null]", "word:c": ". [1]"})
    assert await store.beat(record()) == Answer()
    assert not [one for one in await store._redis.hkeys(key) if one.startswith(b"word:")]
    assert ids(await anext(store.workers())) == {"v"}


KEYS = ("workers", "alive", "mark", "epoch", "logs", "logs:", "sizes", "tenants", "bytes")


async def test_keys_that_hold_something_else_are_taken_away(store: RedisStore, record: Record) -> None:
    redis = store._redis
    for key in KEYS:
        for odd in (redis.set, redis.rpush, redis.sadd):
            await redis.flushall()
            await odd(f"outrider:{key}", "1e400")
            assert await anext(store.workers()) == {}
            await store.beat(record())
            assert ids(await anext(store.workers())) == {"v"}, key
            log = Append(SessionId(bytes(16)), Owner("router"), 0, [b"record"])
            assert await store.logs.append([log], 60) == [1], key
            await store.leave(record().info.identity)
            assert await anext(store.workers()) == {}


@pytest.mark.parametrize("ttl_seconds", [TTL_SECONDS])
async def test_a_clock_that_jumps_over_records_jumps_over_the_epoch_too(
    store: RedisStore, record: Record
) -> None:
    """Which is then another one, as after a loss: nobody is dropped who has had no time to beat."""
    await store.beat(record())
    for _ in range(2):  # each listing renews it
        await anext(store.workers())
        assert 500 < await store._redis.pttl("outrider:epoch") / TTL_SECONDS <= 750
        await store._redis.pexpire("outrider:epoch", round(400 * TTL_SECONDS))


@pytest.mark.parametrize("ttl_seconds", [TTL_SECONDS])
async def test_expired_ids_do_not_pile_up(store: RedisStore, record: Record) -> None:
    said = store.workers()
    await store.beat(record())
    while (await anext(said)) != {}:
        pass
    for name in ("outrider:workers", "outrider:alive"):
        assert await store._redis.zcard(name) == 0
    await said.aclose()


async def test_a_full_redis_as_in_the_manifests_evicts_logs_and_no_registration(
    redis: RedisServer, store: RedisStore, record: Record
) -> None:
    """What has no TTL, as Ray's state, stays too. Redis tells ages by whole seconds: so long is a pause."""
    configured = {"maxmemory": "12mb", "maxmemory-policy": "volatile-lru", "maxmemory-samples": "10"}
    for name, value in configured.items():
        await store._redis.config_set(name, value)
    await store._redis.set("RAY", b"state")
    lasting = RedisStore(parse_store_url(redis.url), ttl_seconds=60)
    workers = [record(f"w{number}") for number in range(20)]
    logs = []
    for batch in range(4):
        for number in range(500):
            if number % 50 == 0:  # as often as they do while so many logs come, however slow this machine is
                for worker in workers:
                    await lasting.beat(worker)
            logs.append(SessionId((500 * batch + number + 1).to_bytes(16)))
            await store.logs.append([Append(logs[-1], Owner("r"), 0, [b"x" * 9000])], 600)
        await asyncio.sleep(1.1)
    assert (await store._redis.info("stats"))["evicted_keys"] > 0
    kept = [await store.logs.read(log) is not None for log in logs]
    assert sum(kept[:500]) < 100 and sum(kept[-500:]) > 400  # Redis compares ages of a few that it draws
    assert len(await anext(store.workers())) == len(workers)
    assert await store._redis.get("RAY") == b"state"
    await lasting.close()


async def test_a_redis_that_evicts_nothing_is_not_full_for_who_has_little(store: RedisStore) -> None:
    """Who has most in it loses its oldest logs, also where there is less room than logs may take."""
    for name, value in {"maxmemory": "12mb", "maxmemory-policy": "noeviction"}.items():
        await store._redis.config_set(name, value)
    few, many = Append(SessionId(bytes(16)), Owner("r"), 0, [b"x"], "few"), list[Append]()
    await store.logs.append([few], 600)
    for number in range(1, 2000):
        many.append(Append(SessionId(number.to_bytes(16)), Owner("r"), 0, [b"x" * 9000], "many"))
        await store.logs.append(many[-1:], 600)
    assert await store.logs.append([few._replace(base=1)], 600) == [2]
    assert await store.logs.read(many[0].session_id) is None
    assert await store.logs.read(many[-1].session_id) is not None
    assert (await store._redis.info("stats"))["evicted_keys"] == 0


@pytest.mark.parametrize("password", ["", ":wrong@", "nobody:wrong@"])
async def test_a_wrong_password_is_named_and_not_told(
    redis: RedisServer, record: Record, password: str
) -> None:
    store = RedisStore(parse_store_url(f"redis://{password}127.0.0.1:{redis.port}"))
    with pytest.raises(
        StartupError, match=r"^--store: the Redis does not accept this user name and password"
    ):
        await register(store, record)
    with pytest.raises(StartupError) as refused:
        await anext(store.workers())
    assert "wrong" not in str(refused.value) and str(redis.port) not in str(refused.value)
    await store.close()


async def test_a_password_where_none_is_needed_is_refused_too(redis: RedisServer, store: RedisStore) -> None:
    await store._redis.config_set("requirepass", "")
    with pytest.raises(StartupError, match=r"^--store: the Redis does not accept"):
        await RedisStore(parse_store_url(redis.url)).logs.append((), 60)


async def test_a_password_that_changes_while_it_runs_ends_nobody(
    redis: RedisServer, store: RedisStore
) -> None:
    await store.logs.append((), 60)
    await store._redis.config_set("requirepass", "another")
    await store._redis.connection_pool.disconnect()
    with pytest.raises(Unavailable, match="AuthenticationError"):
        await store.logs.append((), 60)
    admin = RedisStore(parse_store_url(f"redis://:another@127.0.0.1:{redis.port}"))
    await admin._redis.config_set("requirepass", PASSWORD)
    await store.logs.append((), 60)
    await admin.close()


async def test_by_tls_with_a_certificate_of_ones_own(
    redis_of_all: RedisServer, record: Record, tmp_path: Path
) -> None:
    async with TlsTerminator(redis_of_all.port, tmp_path) as tls:
        url = f"rediss://:{QUOTED_PASSWORD}@127.0.0.1:{tls.port}/1"
        trusting = RedisStore(parse_store_url(f"{url}?ssl_ca_certs={tls.ca_certs}"))
        assert await trusting.beat(record()) == Answer()
        assert ids(await anext(trusting.workers())) == {"v"}
        await trusting.close()
        wary = RedisStore(parse_store_url(url))
        with pytest.raises(StartupError, match=r"^--store: the Redis's certificate is not trusted"):
            await wary.beat(record())
        await wary.close()


@pytest.mark.parametrize("line_in_handshake", [True, False])
async def test_tls_where_none_is_spoken(line_in_handshake: bool) -> None:
    """A Redis answers lines. Whether there is the end of one in a handshake is a matter of chance."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if line_in_handshake:
            await reader.read(1)
        else:
            await reader.readuntil(b"PING\r\n")
        writer.write(b"-NOAUTH Authentication required.\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as plain:
        port = plain.sockets[0].getsockname()[1]
        store = RedisStore(parse_store_url(f"rediss://127.0.0.1:{port}"))
        with pytest.raises(StartupError, match=r"^--store: the Redis does not speak TLS"):
            await store.logs.append((), 60)
        await store.close()


async def test_a_redis_that_is_away_is_waited_for_with_tls_too() -> None:
    store = RedisStore(parse_store_url("rediss://127.0.0.1:1"))
    with pytest.raises(Unavailable):
        await store.logs.append((), 60)
    await store.close()


@pytest.mark.parametrize("asked", ["read", "listing"])
async def test_who_is_cancelled_ends_wherever_that_meets_the_asking(store: RedisStore, asked: str) -> None:
    """Python 3.11's wait_for, by which the client library writes, loses a cancellation that comes in the
    moment in which it has written: who asks again and again would then never end."""

    async def ask() -> None:
        if asked == "read":
            await store.logs.append((), 60)
        else:
            async with aclosing(cast(AsyncGenerator[Any, None], store.workers())) as listings:
                await anext(listings)

    await ask()  # connects
    for turns in range(30):  # of the loop, before the cancellation
        task = asyncio.create_task(ask())
        for _ in range(turns):
            await asyncio.sleep(0)
        if not task.cancel():
            break  # it had ended
        await asyncio.wait((task,))
        assert task.cancelled(), f"after {turns} turns"


async def test_services_with_databases_of_their_own_share_nothing(redis: RedisServer, record: Record) -> None:
    """Each has a worker of the same id; one has a session, and the other is asked for it and cancels it."""
    urls = (redis.url, redis.url.removesuffix("/0") + "/1")
    one, other = (RedisStore(parse_store_url(url), ttl_seconds=60) for url in urls)
    session = SessionId(b"s" * 16)
    for store, name in ((one, "only-one"), (other, "only-other")):
        await store.beat(record("both"))
        await store.beat(record(name))
    await one.logs.append([Append(session, Owner("r"), 0, [b"text"])], 60)
    assert await other.logs.read(session) is None and await other.logs.take(session, "r", 60) is None
    await other.logs.cancel(session)
    assert await one.logs.read(session) is not None
    claim = await one.logs.claim(session)
    assert claim is not None and not claim.cancelled
    await other.leave(record("both").info.identity)
    for store, there in ((one, {"both", "only-one"}), (other, {"only-other"})):
        async with aclosing(cast(Any, store.workers())) as said:
            assert ids(await anext(said)) == there
        await store.close()
