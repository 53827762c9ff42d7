"""Routers that begin, take over, write, repeat and overtake one another, and a store that loses its memory:
the log against a plain model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from outrider.store import redis
from outrider.store.logs import Append, Owner, SessionLogs
from outrider.store.memory_logs import MemorySessionLogs
from outrider.store.redis import RedisStore
from outrider.store.url import parse_store_url
from outrider.wire.session import SessionId
from tests.redis_server import RedisServer

TTL = 1000.0
SESSIONS = [SessionId(bytes([n]) * 16) for n in range(2)]
ROUTERS = ("a", "b", "c")


def record(start: int, tokens: int) -> bytes:
    """So many tokens: every router computes the same ones, whatever its steps."""
    return b"".join(b"%d " % position for position in range(start, start + tokens))


@dataclass
class Writer:
    """A router's page of a session."""

    owner: Owner
    records: list[bytes]
    tokens: int
    superseded: bool = False


@dataclass
class Log:
    """The log as it should be."""

    owner: Owner
    records: list[bytes] = field(default_factory=list)


class Machine(RuleBasedStateMachine):
    redis: RedisServer | None = None

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.store = None if self.redis is None else RedisStore(parse_store_url(self.redis.url))
        self.logs: SessionLogs = MemorySessionLogs() if self.store is None else self.store.logs
        self.model: dict[SessionId, Log] = {}
        self.writers: dict[tuple[SessionId, str], Writer] = {}
        self.begun: set[SessionId] = set()
        self.forget()

    def teardown(self) -> None:
        if self.store is not None:
            self.runner.run(self.store.close())
        self.runner.close()

    def forget(self) -> None:
        if self.store is None:
            self.logs = MemorySessionLogs()
        else:
            self.runner.run(self.store._redis.flushall())

    @rule()
    def the_store_loses_its_memory(self) -> None:
        self.forget()
        self.model.clear()

    @rule(session=st.sampled_from(SESSIONS), router=st.sampled_from(ROUTERS))
    def begin(self, session: SessionId, router: str) -> None:
        if session not in self.begun:
            self.begun.add(session)
            self.writers[session, router] = Writer(Owner(router), [b"request "], 0)

    @rule(session=st.sampled_from(SESSIONS), router=st.sampled_from(ROUTERS))
    def take(self, session: SessionId, router: str) -> None:
        taken = self.runner.run(self.logs.take(session, router, TTL))
        log = self.model.get(session)
        if log is None:
            assert taken is None
            return
        assert taken is not None
        assert taken.owner == Owner(router, log.owner.generation + 1)
        assert (taken.length, taken.content) == (len(log.records), b"".join(log.records))
        log.owner = taken.owner
        self.writers[session, router] = Writer(taken.owner, list(log.records), len(taken.content.split()) - 1)

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), tokens=st.integers(1, 3))
    def commit(self, data: Any, tokens: int) -> None:
        writer = self.writers[data.draw(st.sampled_from(sorted(self.writers)))]
        writer.records.append(record(writer.tokens, tokens))
        writer.tokens += tokens

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def write(self, data: Any) -> None:
        """Several at once, each from anywhere in what it has, and not always to its end."""
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.writers)), min_size=1, unique=True))
        appends, wanted = [], []
        for key in chosen:
            writer = self.writers[key]
            base = data.draw(st.integers(0, len(writer.records) - 1), label="base")
            end = data.draw(st.integers(base + 1, len(writer.records)), label="end")
            appends.append(Append(key[0], writer.owner, base, writer.records[base:end]))
            wanted.append(self._expect(key[0], writer, base, end))
        assert self.runner.run(self.logs.append(appends, TTL)) == wanted

    def _expect(self, session: SessionId, writer: Writer, base: int, end: int) -> int | None:
        log = self.model.get(session)
        if log is not None and log.owner != writer.owner:
            if log.owner.generation >= writer.owner.generation:
                writer.superseded = True
                return None
            del self.model[session]
            log = None
        if log is None:
            if base > 0:
                return 0
            log = self.model[session] = Log(writer.owner)
        if base <= len(log.records) < end:
            log.records = writer.records[:end]
        return len(log.records)

    @invariant()
    def the_log_has_no_gap_and_nothing_twice(self) -> None:
        for session in SESSIONS:
            log = self.model.get(session)
            first = self.runner.run(self.logs.read(session))
            assert first == (None if log is None else log.records[0])
            if log is not None:
                content = self._content(session)
                assert content == b"".join(log.records)
                tokens = content.split()[1:]
                assert tokens == [b"%d" % position for position in range(len(tokens))]

    @invariant()
    def of_the_writers_at_most_one_was_not_superseded_and_is_the_owner(self) -> None:
        for session, log in self.model.items():
            owners = [key for key, writer in self.writers.items() if writer.owner == log.owner]
            assert len([key for key in owners if key[0] == session]) <= 1
            for (of, _), writer in self.writers.items():
                if of == session and writer.superseded:
                    assert writer.owner.generation <= max(
                        log.owner.generation,
                        *(w.owner.generation for (o, _), w in self.writers.items() if o == session),
                    )

    def _content(self, session: SessionId) -> bytes:
        """Without taking it."""
        if isinstance(self.logs, MemorySessionLogs):
            return bytes(self.logs._logs[session].content)
        assert self.store is not None
        key = b"outrider:session:" + session.hex().encode()
        entries: Any = self.runner.run(self.store._redis.xrange(key))
        return b"".join(fields[b"r"] for _, fields in entries)


@pytest.fixture(params=["memory", "redis"])
def machine(
    request: pytest.FixtureRequest, redis_of_all: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[type[Machine]]:
    # On a busy machine a Redis may pause for longer than routers wait, and the machine would take that for
    # another story of what happened.
    monkeypatch.setattr(redis, "REDIS_ANSWER_SECONDS", 60.0)

    class Chosen(Machine):
        redis = None if request.param == "memory" else redis_of_all

    yield Chosen


def test_a_log_is_as_a_plain_model_says(machine: type[Machine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=50, stateful_step_count=30))
