"""What answers in a Redis' place says what is no answer: a proxy, or somebody on the way. It is told as if
the Redis were away; a router had ended by one such answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress

import pytest

from outrider.errors import Unavailable
from outrider.store import redis
from outrider.store.logs import Append, Owner
from outrider.store.redis import RedisStore
from outrider.store.url import parse_store_url
from outrider.wire.description import WorkerRecord
from outrider.wire.session import SessionId

SESSION = SessionId(b"s" * 16)
NO_ANSWERS = (
    b":7\r\n",
    b":::\r\n",
    b"$x\r\n",
    b"$3\r\nabc\r\n",
    b"*0\r\n",
    b"*-1\r\n",
    b"*1\r\n$-1\r\n",
    b"*2\r\n$1\r\nx\r\n$1\r\nx\r\n",
    b"*2\r\n:99\r\n:99\r\n",
    b"*3\r\n$1\r\na\r\n$1\r\nb\r\n$1\r\nc\r\n",
    b"*3\r\n$1\r\na\r\n$1\r\nb\r\n*2\r\n$1\r\nc\r\n*0\r\n",
    b"*1\r\n*2\r\n$3\r\n1-0\r\n*2\r\n$1\r\nr\r\n:1\r\n",
    b"*1\r\n" * 5000 + b":1\r\n",
)


@asynccontextmanager
async def saying(answer: bytes, unless: bytes | None = None) -> AsyncIterator[RedisStore]:
    """The store of a server that answers every command alike, but for one that it does not answer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readline():
            words = []
            for _ in range(int(head[1:])):
                length = await reader.readline()
                words.append((await reader.readexactly(int(length[1:]) + 2))[:-2])
            if words[0] != unless:
                writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    store = RedisStore(parse_store_url(f"redis://{host}:{port}/0"))
    try:
        yield store
    finally:
        await store.close()
        server.close()


@pytest.mark.parametrize("answer", NO_ANSWERS, ids=lambda answer: repr(answer[:40]))
async def test_whatever_is_said_nothing_but_unavailable_is_raised(
    answer: bytes, record: Callable[..., WorkerRecord]
) -> None:
    append = Append(SESSION, Owner("router"), 0, [b"request"], "alice")
    async with saying(answer) as store:
        for ask in (
            lambda: store.beat(record()),
            lambda: store.leave(record().info.identity),
            lambda: store.answer(record().info.identity, "router", None),
            lambda: store.logs.append([append], 60),
            lambda: store.logs.take(SESSION, "router", 60),
            lambda: store.logs.read(SESSION),
            lambda: store.logs.cancel(SESSION),
            lambda: store.logs.claim(SESSION),
            lambda: store.logs.last(SESSION),
        ):
            for _ in range(2):  # scripts are sent when they turn out not to be known
                with suppress(Unavailable):
                    await ask()


@pytest.mark.parametrize("answer", NO_ANSWERS, ids=lambda answer: repr(answer[:40]))
async def test_who_follows_the_workers_goes_on(answer: bytes) -> None:
    async with saying(answer) as store, aclosing(store.workers()) as workers:
        following = asyncio.ensure_future(anext(workers))
        done, _ = await asyncio.wait((following,), timeout=0.2)
        if done:
            assert following.result() == {}
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_one_that_answers_all_but_scripts_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs are written by scripts. They had been given up one by one, and nothing was said of it."""
    monkeypatch.setattr(redis, "REDIS_ANSWER_SECONDS", 0.1)
    async with saying(b"+OK\r\n", unless=b"EVALSHA") as store:
        with pytest.raises(Unavailable):
            await store.logs.append((), 60)
