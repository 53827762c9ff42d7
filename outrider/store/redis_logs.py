"""The logs of sessions in a Redis.

| key | type | content |
|---|---|---|
| `outrider:session:HEX` | stream, expires | the records in order, as field `r`; the n-th has the ID n-0 |
| `outrider:owner:HEX` | hash, expires | `name` and `generation` of who may append |
| `outrider:probe` | string, expires | nothing: it is set to see whether the Redis can be written to |

All appends of a writing are one script call, whose answer names only those that went otherwise than wished.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, TypeVar

from redis.asyncio import Redis

from outrider.store.logs import Append, Owner, Taken
from outrider.wire.session import SessionId

STREAM, OWNER = b"outrider:session:", b"outrider:owner:"
PROBE, PROBE_MS = b"outrider:probe", 10_000
SUPERSEDED = -1

# KEYS: stream and owner of each log. ARGV: ttl in ms; for each log name, generation, base, number of records,
# records. A stream without its owner, or the other way round, is no log: either may have been evicted.
APPEND = """
local ttl, answers, at = ARGV[1], {}, 2
for i = 1, #KEYS, 2 do
  local stream, owner = KEYS[i], KEYS[i + 1]
  local name, generation = ARGV[at], tonumber(ARGV[at + 1])
  local base, count = tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local known = redis.call('HMGET', owner, 'name', 'generation')
  local before, length = tonumber(known[2] or -1), redis.call('XLEN', stream)
  if before > generation or (before == generation and known[1] ~= name) then
    length = -1
  else
    if before < generation and length > 0 then
      redis.call('DEL', stream, owner)
      length = 0
    end
    if base <= length then
      for n = length + 1, base + count do
        redis.call('XADD', stream, n .. '-0', 'r', ARGV[at + 3 + n - base])
        length = n
      end
      if before < generation then
        redis.call('HSET', owner, 'name', name, 'generation', generation)
      end
      redis.call('PEXPIRE', owner, ttl)
      redis.call('PEXPIRE', stream, ttl)
    end
  end
  if length ~= base + count then
    answers[#answers + 1] = (i - 1) / 2
    answers[#answers + 1] = length
  end
  at = at + 4 + count
end
return answers
"""
TAKE = """
if redis.call('EXISTS', KEYS[1], KEYS[2]) < 2 then return false end
redis.call('HSET', KEYS[2], 'name', ARGV[1])
local generation = redis.call('HINCRBY', KEYS[2], 'generation', 1)
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
local records = {}
for i, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+')) do records[i] = entry[2][2] end
return {generation, #records, table.concat(records)}
"""

T = TypeVar("T")


class Asked(Protocol):
    """Waits for an answer of the Redis. Raises Unavailable in place of Redis's own errors."""

    async def __call__(self, asked: Awaitable[T]) -> T: ...


class RedisSessionLogs:
    """Implements SessionLogs."""

    def __init__(self, redis: Redis, asked: Asked) -> None:
        self._redis = redis
        self._asked = asked
        self._append, self._take = (redis.register_script(script) for script in (APPEND, TAKE))

    async def append(self, appends: Sequence[Append], ttl_seconds: float) -> list[int | None]:
        if not appends:
            await self._asked(self._redis.set(PROBE, b"", px=PROBE_MS))
            return []
        keys: list[bytes] = []
        args: list[Any] = [_milliseconds(ttl_seconds)]
        for one in appends:
            keys += _keys(one.session_id)
            args += (one.owner.name, one.owner.generation, one.base, len(one.records), *one.records)
        answers: list[int] = await self._asked(self._append(keys=keys, args=args))
        lengths: list[int | None] = [one.base + len(one.records) for one in appends]
        for index, length in zip(answers[::2], answers[1::2], strict=True):
            lengths[index] = None if length == SUPERSEDED else length
        return lengths

    async def take(self, session_id: SessionId, name: str, ttl_seconds: float) -> Taken | None:
        answer = await self._asked(
            self._take(keys=_keys(session_id), args=[name, _milliseconds(ttl_seconds)])
        )
        if answer is None:
            return None
        generation, length, content = answer
        return Taken(Owner(name, generation), length, content)

    async def read(self, session_id: SessionId) -> bytes | None:
        stream, _ = _keys(session_id)
        entries: Any = await self._asked(self._redis.xrange(stream, "1-0", "1-0"))
        return entries[0][1][b"r"] if entries else None


def _keys(session_id: SessionId) -> list[bytes]:
    name = session_id.hex().encode()
    return [STREAM + name, OWNER + name]


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
