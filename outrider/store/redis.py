"""The store that several routers share: a Redis (6.2 or newer, alone or with replicas; no Redis Cluster).

| key | type | content |
|---|---|---|
| `outrider:worker:ROLE:ID` | hash, expires | `record` (outrider.v1.Registration), `description` (the same without its load), `incarnation`, `address`, `caller` (whose record it is), and a `word:ROUTER` for each router: when it was said (unix seconds), a blank, JSON [refusal, trouble] |
| `outrider:workers`, `outrider:alive`, `outrider:mark` | sorted sets, string | which of the above there are, and what is new of them: redis_listing.py |
| `outrider:epoch` | string, expires | random; another one than before means that the Redis has lost its memory, or that its clock jumped so far that records expired |
| `outrider:session:HEX`, `outrider:owner:HEX` | stream, hash | a session's log: redis_logs.py |
| `outrider:changes` | channel | the ROLE:ID of a worker that came, changed or left |

Who watches asks again every POLL_SECONDS too: an expiry is announced to nobody, and a message may be lost.
"""  # noqa: E501 (a table)

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.connection import BlockingConnectionPool, ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, RedisError

from outrider.errors import OutriderError, StartupError, Unavailable
from outrider.net.tasks import propagate_cancel
from outrider.store.redis_answers import NO_ANSWER, read
from outrider.store.redis_listing import ALIVE, INDEX, MARK, NOW, WORKER, Listing
from outrider.store.redis_logs import RedisSessionLogs
from outrider.store.store import (
    TTL_SECONDS,
    WORD_SECONDS,
    Answer,
    Word,
    WorkerRecord,
    answer_of,
    changed,
    id_in_use,
    twice,
)
from outrider.store.url import StoreUrl
from outrider.wire.hello import Identity, WorkerKey
from outrider.wire.registry import RECORD

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
EPOCH_SHARE = 0.75  # of a record's time: a clock that jumps over records jumps over the epoch, too
REDIS_ANSWER_SECONDS = 2.0  # a Redis that has not answered by then is away
MOST_CONNECTIONS = 16  # of one process; who finds all in use waits for one, and then as for an answer
MOST_WORDS = 256  # to workers that one call takes
AWAY_SECONDS = 0.25  # between attempts to reach one that is away
LISTING_SECONDS = 0.2  # between two listings at least: many that come at once are one change
CHANGES = "outrider:changes"
WORD = b"word:"
IN_USE, TWICE, LEFT = b"in use", b"twice", b"left"  # what BEAT and LEAVE answer
NO_TLS = "--store: the Redis does not speak TLS on this port: write redis:// or take its TLS port"

BEAT = (
    NOW
    + """
keep('hash', KEYS[1])
keep('zset', KEYS[3], KEYS[4])
local known = redis.call('HMGET', KEYS[1], 'incarnation', 'description', 'caller', 'address')
if known[1] and known[3] ~= ARGV[7] then return 'in use' end
local function is_less(one, other)
  return #one < #other or (#one == #other and one < other)
end
if string.match(known[1] or '', '^%d+$') and redis.call('PTTL', KEYS[1]) > 0 then  -- as store.gives_way
  local same = known[1] == ARGV[2]
  if is_less(ARGV[2], known[1]) or (same and known[4] and known[4] ~= ARGV[8]) then return 'twice' end
end
if known[1] ~= ARGV[2] then redis.call('DEL', KEYS[1]) end
redis.call('HSET', KEYS[1], 'incarnation', ARGV[2], 'description', ARGV[3], 'record', ARGV[4])
redis.call('HSET', KEYS[1], 'caller', ARGV[7], 'address', ARGV[8])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
local time = redis.call('TIME')
redis.call('ZADD', KEYS[4], time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[5], ARGV[1])
if known[1] ~= ARGV[2] or known[2] ~= ARGV[3] or not redis.call('ZSCORE', KEYS[3], ARGV[1]) then
  redis.call('ZADD', KEYS[3], mark(), ARGV[1])
  redis.call('PUBLISH', KEYS[5], ARGV[1])
end
local fields, words = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #fields, 2 do
  if string.sub(fields[i], 1, 5) == 'word:' then
    local said, word = string.match(fields[i + 1], '^([%d.]+) (.*)$')
    said = tonumber(said or '')
    if not said or time[1] + time[2] / 1e6 - said > tonumber(ARGV[6]) then
      redis.call('HDEL', KEYS[1], fields[i])
    else
      table.insert(words, fields[i])
      table.insert(words, word)
    end
  end
end
return words
"""
)
LEAVE = (
    NOW
    + """
keep('hash', KEYS[1])
keep('zset', KEYS[3], KEYS[4])
local known = redis.call('HMGET', KEYS[1], 'incarnation', 'caller')
if known[1] and known[2] ~= ARGV[3] then return 'in use' end
if known[1] == ARGV[2] then
  redis.call('DEL', KEYS[1])
  redis.call('ZREM', KEYS[3], ARGV[1])
  redis.call('ZREM', KEYS[4], ARGV[1])
  mark()
  redis.call('PUBLISH', KEYS[5], ARGV[1])
end
return 'left'
"""
)
ANSWER = """
local time = redis.call('TIME')
for i, key in ipairs(KEYS) do
  if redis.call('HGET', key, 'incarnation') == ARGV[3 * i - 2] then
    redis.call('HSET', key, ARGV[3 * i - 1], string.format('%.3f %s', time[1] + time[2] / 1e6, ARGV[3 * i]))
  end
end
"""
T = TypeVar("T")
Records = Mapping[WorkerKey, WorkerRecord]


@dataclass(slots=True)
class _Word:
    """A router's word on its way to a worker."""

    key: str
    said: tuple[str, bytes, str]  # incarnation, field, JSON
    told: bool = False
    error: OutriderError | None = None


class RedisStore:
    """Implements Store.

    If the Redis refuses before it was ever reached, StartupError is raised. All else that goes wrong is
    Unavailable.
    """

    def __init__(
        self,
        url: StoreUrl,
        ttl_seconds: float = TTL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        word_seconds: float = WORD_SECONDS,
    ) -> None:
        """Connects when it is used. `clock` gives seconds."""
        self._url = url
        self._redis: Redis = Redis(connection_pool=_pool(url))
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._word_seconds = word_seconds
        self._reached = False
        self._words: list[_Word] = []  # that wait to be told
        self._telling = asyncio.Lock()
        self.logs = RedisSessionLogs(self._redis, self._asked)
        self._beat, self._leave, self._answer = (
            self._redis.register_script(script) for script in (BEAT, LEAVE, ANSWER)
        )

    async def beat(self, record: WorkerRecord, caller: str = "") -> Answer:
        identity = record.info.identity
        name = _name(identity)
        description = RECORD.to_bytes(replace(record, load=None))
        asked = self._beat(
            keys=_keys(name),
            args=[
                *(name, str(identity.incarnation), description, RECORD.to_bytes(record)),
                *(round(self._ttl_seconds * 1000), self._word_seconds, caller, record.address),
            ],
        )
        heard = await self._asked(read(asked, _heard))
        if isinstance(heard, bytes):
            raise id_in_use(identity) if heard == IN_USE else twice(identity)
        return answer_of(heard)

    async def leave(self, identity: Identity, caller: str = "") -> None:
        name = _name(identity)
        asked = self._leave(keys=_keys(name), args=[name, str(identity.incarnation), caller])
        if await self._asked(read(asked, _left)) == IN_USE:
            raise id_in_use(identity)

    async def ask(self, command: str) -> Any:
        """Returns the answer to a command without arguments. Raises as everything here."""
        return await self._asked(self._redis.execute_command(command))  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        await self._redis.aclose(close_connection_pool=True)

    async def workers(self) -> AsyncIterator[Records]:
        said: Records | None = None
        epoch: bytes | None = None
        away = False
        trusted_from = self._clock()  # before it, a record that is missing may only not be renewed yet
        while True:
            try:
                async with aclosing(self._listings()) as listings:
                    async for found_epoch, records in listings:
                        if away or epoch not in (None, found_epoch):
                            trusted_from = self._clock() + self._ttl_seconds
                        if away:
                            log.warning("the store is back")
                        away, epoch = False, found_epoch
                        if said is not None and self._clock() < trusted_from:
                            records = {**said, **records}
                        if said is None or (records is not said and changed(said, records)):
                            said = records
                            yield records
            except Unavailable as error:
                if not away:
                    log.warning("%s; going on with the workers that are known", error.message)
                away = True
            await asyncio.sleep(AWAY_SECONDS)

    async def _listings(self) -> AsyncGenerator[tuple[bytes, Records], None]:
        """Yields (epoch, live records): at once, at messages, and every POLL_SECONDS. Raises Unavailable."""
        listing = Listing(self._redis, self._asked, round(EPOCH_SHARE * self._ttl_seconds * 1000))
        async with self._redis.pubsub() as messages:
            await self._asked(messages.subscribe(CHANGES))
            while True:
                yield await listing.ask()
                listed_at = self._clock()
                await self._asked(messages.get_message(timeout=POLL_SECONDS))
                await asyncio.sleep(max(listed_at + LISTING_SECONDS - self._clock(), 0.0))
                while await self._asked(messages.get_message(timeout=0)) is not None:
                    pass  # one listing answers them all

    async def answer(
        self, identity: Identity, router_id: str, refusal: str | None, trouble: str | None = None
    ) -> None:
        said = str(identity.incarnation), WORD + router_id.encode(), json.dumps([refusal, trouble])
        word = _Word(WORKER + _name(identity), said)
        self._words.append(word)
        async with self._telling:
            while not word.told and word.error is None:
                await self._tell()
        if word.error is not None:
            raise word.error

    async def _tell(self) -> None:
        """Tells words that wait, many in one call: a router has one for each worker."""
        now, self._words = self._words[:MOST_WORDS], self._words[MOST_WORDS:]
        try:
            keys, args = [word.key for word in now], [part for word in now for part in word.said]
            await self._asked(self._answer(keys=keys, args=args))
        except OutriderError as error:
            for word in now:
                word.error = error
        except BaseException:  # who tells them is cancelled: whoever waits next tells them
            self._words[:0] = now
            raise
        else:
            for word in now:
                word.told = True

    async def _asked(self, asked: Awaitable[T]) -> T:
        try:
            answer = await propagate_cancel(asked)
        except (RedisError, OSError) as error:
            await self._connect_anew()
            sentence = None if self._reached else _refusal(error) or await _without_tls(self._url)
            if sentence is not None:
                raise StartupError(sentence) from None
            raise Unavailable(f"the store cannot be reached at the moment ({_kind(error)})") from None
        except NO_ANSWER as error:
            await self._connect_anew()
            raise Unavailable(f"the store says what is no answer ({type(error).__name__})") from None
        self._reached = True
        return answer

    async def _connect_anew(self) -> None:
        """Lets what asks next do so by another connection: on these the answers to other questions may come,
        they may lead to a Redis that has given its place to another, or be shut after a refusal."""
        idle: list[Any] = self._redis.connection_pool._available_connections
        taken = idle[:]
        idle.clear()  # at once: the pool's own `disconnect` would shut those that others take meanwhile
        await asyncio.gather(*(connection.disconnect() for connection in taken), return_exceptions=True)


def _pool(url: StoreUrl) -> ConnectionPool:
    options: dict[str, Any] = {
        "host": url.host,
        "port": url.port,
        "db": url.database,
        "username": url.username,
        "password": url.password,
        "protocol": 2,
        "socket_timeout": REDIS_ANSWER_SECONDS,
        "socket_connect_timeout": REDIS_ANSWER_SECONDS,
        "retry": Retry(NoBackoff(), 0),  # whoever asks knows better what a lost connection means
    }
    if url.tls:
        options |= {"connection_class": SSLConnection, "ssl_ca_certs": url.ca_certs}
    return BlockingConnectionPool(max_connections=MOST_CONNECTIONS, timeout=REDIS_ANSWER_SECONDS, **options)


def _keys(name: str) -> list[str]:
    return [WORKER + name, MARK, INDEX, ALIVE, CHANGES]


def _name(identity: Identity) -> str:
    return f"{identity.role.name.lower()}:{identity.worker_id}"


def _heard(answer: Any) -> dict[str, Word] | bytes:
    """Reads what BEAT answers: words, or IN_USE or TWICE."""
    return answer if answer in (IN_USE, TWICE) else _words(answer)


def _left(answer: Any) -> bytes:
    """Reads what LEAVE answers."""
    if answer not in (IN_USE, LEFT):
        raise ValueError("it is neither a refusal nor done")
    return bytes(answer)


def _words(fields: list[bytes]) -> dict[str, Word]:
    """Returns [name, value, name, value, ...] as words by router id, without those that are damaged."""
    words = {}
    for name, value in zip(fields[::2], fields[1::2], strict=True):
        try:
            refusal, trouble = json.loads(value)
            words[name[len(WORD) :].decode()] = (refusal, trouble)
        except (ValueError, TypeError):
            log.debug("a router's word in the store is not understood")
    return words


def _refusal(error: BaseException) -> str | None:
    """Returns what to change about --store, if waiting does not help."""
    if isinstance(error, AuthenticationError | AuthorizationError | NoPermissionError):
        return (
            "--store: the Redis does not accept this user name and password (or needs them): change the url"
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"--store: the Redis's certificate is not trusted ({error.verify_message}): "
            "name the file of its authority with ?ssl_ca_certs=FILE"
        )
    if isinstance(error, ssl.SSLError):
        return NO_TLS
    cause = error.__cause__ or error.__context__
    return None if cause is None else _refusal(cause)


async def _without_tls(url: StoreUrl) -> str | None:
    """Returns what to change about --store where TLS is wanted of a Redis that speaks none. It waits for the
    end of what it takes for a command, so that a handshake only times out."""
    if not url.tls:
        return None
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(REDIS_ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(url.host, url.port)
            try:
                writer.write(b"PING\r\n")
                if (await reader.read(1)) in (b"+", b"-"):
                    return NO_TLS
            finally:
                writer.close()
    return None


def _kind(error: BaseException) -> str:
    """Returns the error's class, and the first word if the Redis itself said it. It tells no address and
    no password."""
    said = str(error).partition(" ")[0]
    return f"{type(error).__name__} {said}" if said.isupper() and said.isalpha() else type(error).__name__
