"""Session log writers for tests, and what is written in them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from outrider.store.logs import Taken
from outrider.store.redis import RedisStore
from outrider.store.url import parse_store_url
from outrider.wire.session import SessionId, new_session_id
from router.held_logs import LogCursor
from router.metrics import Metrics
from router.requests import TokensCommitted
from router.session_log_writer import SessionLogWriter
from router.transcript import Transcript
from tests.redis_server import RedisServer
from tests.router.asking import request

TTL = 100.0


def transcript(tokens: int = 0, session_id: SessionId | None = None) -> Transcript:
    made = Transcript(request(session_id=session_id or new_session_id(), fingerprint="f"))
    for _ in range(tokens):
        commit(made)
    return made


def commit(transcript: Transcript) -> None:
    transcript.add(TokensCommitted((transcript.output_tokens,), 0, 0))


@asynccontextmanager
async def writing(
    logs: Any, name: str = "router", ttl: float = TTL, **options: Any
) -> AsyncIterator[SessionLogWriter]:
    log_writer = SessionLogWriter(logs, name, Metrics(), ttl, **options)
    task = asyncio.create_task(log_writer.run())
    try:
        yield log_writer
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def store_of(redis: RedisServer) -> AsyncIterator[RedisStore]:
    store = RedisStore(parse_store_url(redis.url))
    yield store
    await store.close()


def cursors(log_writer: SessionLogWriter, count: int) -> list[LogCursor]:
    return [log_writer.begin(transcript(), lambda: None) for _ in range(count)]


async def taken(logs: Any, cursor: LogCursor) -> Transcript:
    """Returns the session as another router finds it."""
    found: Taken | None = await logs.take(cursor.session_id, "another", TTL)
    assert found is not None
    return Transcript.from_log(cursor.session_id, found.content)


def metric(log_writer: SessionLogWriter, name: str) -> float | None:
    return log_writer._metrics.registry.get_sample_value(name)


async def until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110 (plain state)
        await asyncio.sleep(0.005)
