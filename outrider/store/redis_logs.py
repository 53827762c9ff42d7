"""The logs of sessions in a Redis.

| key | type | content |
|---|---|---|
| `outrider:session:HEX` | stream, expires | the records in order, as field `r`; the n-th has the ID n-0 |
| `outrider:owner:HEX` | hash, expires | `name` and `generation` of who may append; `bytes`, and how many are `booked`; `cancelled` |
| `outrider:logs`, `outrider:logs:TENANT` | sorted set | HEX of each log, of one tenant, by its expiry (unix ms) |
| `outrider:sizes` | hash | of each HEX the booked bytes, a blank, the tenant |
| `outrider:tenants` | sorted set | tenants by their booked bytes |
| `outrider:bytes` | string | the sum of these |
| `outrider:probe` | string, expires | nothing: it is set to see whether the Redis can be written to |

All appends of a writing are one script call, whose answer names only those that went otherwise than wished.
It also keeps the books: a log is booked anew if it has grown by PAGE bytes, or if what they say of it is over.
"""  # noqa: E501 (a table)

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from outrider.errors import superseded
from outrider.store.logs import MAX_BYTES, Append, Claim, Lead, Owner, Taken
from outrider.store.redis_answers import Asked, read, whole_bytes
from outrider.store.redis_keys import KEEP
from outrider.wire.session import SessionId

STREAM, OWNER = b"outrider:session:", b"outrider:owner:"
PROBE, PROBE_MS = b"outrider:probe", 10_000
SUPERSEDED = -1
MOST_DIGITS = 15  # of a number that Redis and its scripts count with alike
FULL, STAYS = "OOM command not allowed", 0.75  # share of the logs in a Redis that is

# The books of all logs. `drop` takes logs away until no more than `most` bytes are left: of the tenant that
# has most, the oldest that does not go on.
BOOKS = (
    KEEP
    + """
local LOGS, SIZES, TENANTS, TOTAL = 'outrider:logs', 'outrider:sizes', 'outrider:tenants', 'outrider:bytes'
keep('zset', LOGS, TENANTS)
keep('hash', SIZES)
keep('string', TOTAL)
local total = redis.call('GET', TOTAL) or '0'  -- what Redis counts on with, and a script can
if (total ~= '0' and not string.match(total, '^-?[1-9]%d*$')) or #total > 15 then redis.call('DEL', TOTAL) end
local function known_size(hex)
  local bytes, tenant = string.match(redis.call('HGET', SIZES, hex) or '', '^(%d+) (.*)$')
  return tonumber(bytes or 0), tenant
end
local function strike(hex)
  local bytes, tenant = known_size(hex)
  redis.call('ZREM', LOGS, hex)
  if not tenant then return end
  redis.call('ZREM', LOGS .. ':' .. tenant, hex)
  redis.call('HDEL', SIZES, hex)
  redis.call('DECRBY', TOTAL, bytes)
  if tonumber(redis.call('ZINCRBY', TENANTS, -bytes, tenant)) <= 0 then
    redis.call('ZREM', TENANTS, tenant)
  end
end
local function drop(most, goes_on)
  local turns = 0
  while tonumber(redis.call('GET', TOTAL) or 0) > most and turns < 1000 do
    turns = turns + 1
    local greatest = redis.call('ZREVRANGE', TENANTS, 0, 0, 'WITHSCORES')
    local theirs = LOGS .. ':' .. (greatest[1] or '')
    local oldest = redis.call('ZRANGE', theirs, 0, 0, 'WITHSCORES')
    if not oldest[1] then  -- somebody else has taken the books away
      redis.call('DEL', theirs)
      redis.call('DECRBY', TOTAL, greatest[2] or redis.call('GET', TOTAL))
      redis.call('ZREM', TENANTS, greatest[1] or '')
    elseif not goes_on(oldest[1], tonumber(oldest[2])) then
      redis.call('DEL', 'outrider:session:' .. oldest[1], 'outrider:owner:' .. oldest[1])
      strike(oldest[1])
      redis.call('ZREM', theirs, oldest[1])
    end
  end
end
"""
)
# What somebody else has put into an owner, and no number that a script counts with, makes it no log.
KNOWN = """
local function whole(text)
  if text and #text <= 15 then return tonumber(string.match(text, '^%d+$')) end
end
local function known_of(stream, owner)
  local known = redis.call('HMGET', owner, 'name', 'generation', 'bytes', 'booked')
  for field = 2, 4 do
    if known[field] and not whole(known[field]) then
      redis.call('DEL', stream, owner)
      return {}
    end
  end
  return known
end
"""
# KEYS: stream and owner of each log. ARGV: ttl in ms, most bytes of all logs; for each log its HEX, tenant,
# name, generation, base, number of records, records. A stream without its owner, or the other way round, is
# no log: either may have been evicted. LOG and RECORD: bytes that a Redis needs beside those of the records.
APPEND = (
    BOOKS
    + KNOWN
    + """
local ttl, answers, at = tonumber(ARGV[1]), {}, 3
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local LOG, RECORD, PAGE = 5000, 16, 4096
local function book(hex, tenant, bytes, expires)
  local before, of = known_size(hex)
  tenant = of or tenant
  keep('zset', LOGS .. ':' .. tenant)
  redis.call('ZADD', LOGS, expires, hex)
  redis.call('ZADD', LOGS .. ':' .. tenant, expires, hex)
  redis.call('HSET', SIZES, hex, bytes .. ' ' .. tenant)
  redis.call('ZINCRBY', TENANTS, bytes - before, tenant)
  redis.call('INCRBY', TOTAL, bytes - before)
end
local function has_lived_on(hex, until_then)
  local left = redis.call('PTTL', 'outrider:session:' .. hex)
  if left <= 0 or now + left <= until_then then return false end
  local bytes, tenant = known_size(hex)
  book(hex, tenant or '', bytes, now + left)
  return true
end
for i = 1, #KEYS, 2 do
  local stream, owner = KEYS[i], KEYS[i + 1]
  local hex, tenant = ARGV[at], ARGV[at + 1]
  at = at + 2
  local name, generation = ARGV[at], tonumber(ARGV[at + 1])
  local base, count = tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local known = known_of(stream, owner)
  local before, length = tonumber(known[2] or -1), redis.call('XLEN', stream)
  if before > generation or (before == generation and known[1] ~= name) then
    length = -1
  else
    if before < generation and length > 0 then
      redis.call('DEL', stream, owner)
      length = 0
    end
    if base <= length then
      local bytes, booked = tonumber(known[3] or 0), tonumber(known[4] or 0)
      if length == 0 then bytes, booked = LOG, -PAGE end
      for n = length + 1, base + count do
        local record = ARGV[at + 3 + n - base]
        redis.call('XADD', stream, n .. '-0', 'r', record)
        length, bytes = n, bytes + #record + RECORD
      end
      if bytes >= booked + PAGE then
        book(hex, tenant, bytes, now + ttl)
        booked = bytes
      end
      redis.call('HSET', owner, 'bytes', bytes, 'booked', booked)
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
for _, hex in ipairs(redis.call('ZRANGEBYSCORE', LOGS, 0, now, 'LIMIT', 0, 100)) do
  if not has_lived_on(hex, now) then strike(hex) end
end
drop(tonumber(ARGV[2]), has_lived_on)
return answers
"""
)
# A Redis that is full, and evicts nothing, takes only what begins with a deletion. ARGV: the share of logs
# that may stay. One that goes on is written again by its router.
MAKE_ROOM = (
    BOOKS + "drop(tonumber(redis.call('GET', TOTAL) or 0) * tonumber(ARGV[1]), function() return false end)"
)
# KEYS: stream and owner, and the owner of the lead, if there is one. ARGV: name, ttl in ms; the lead's name
# and generation.
TAKE = (
    KNOWN
    + """
if KEYS[3] then
  local led = redis.call('HMGET', KEYS[3], 'name', 'generation')
  local before, known = whole(led[2]) or -1, tonumber(ARGV[4])
  if before > known or (before == known and led[1] ~= ARGV[3]) then return -1 end
end
if not known_of(KEYS[1], KEYS[2])[2] or redis.call('EXISTS', KEYS[1]) == 0 then return false end
redis.call('HSET', KEYS[2], 'name', ARGV[1])
local generation = redis.call('HINCRBY', KEYS[2], 'generation', 1)
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
local records = {}
for i, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+')) do records[i] = entry[2][2] end
return {generation, #records, table.concat(records)}
"""
)
# As a script: what answers other commands in time may still not answer scripts, by which logs are written.
PROBED = "return redis.call('SET', KEYS[1], '', 'PX', ARGV[1])"
CANCEL = "if redis.call('EXISTS', KEYS[2]) == 1 then redis.call('HSET', KEYS[2], 'cancelled', 1) end"


class RedisSessionLogs:
    """Implements SessionLogs."""

    def __init__(self, redis: Redis, asked: Asked, max_bytes: int = MAX_BYTES) -> None:
        self._redis = redis
        self._max_bytes = max_bytes
        self._asked = asked
        scripts = map(redis.register_script, (APPEND, TAKE, CANCEL, MAKE_ROOM, PROBED))
        self._append, self._take, self._cancel, self._make_room, self._probe = scripts

    async def append(self, appends: Sequence[Append], ttl_seconds: float) -> list[int | None]:
        if not appends:
            await self._asked(self._probe(keys=[PROBE], args=[PROBE_MS]))
            return []
        keys: list[bytes] = []
        args: list[Any] = [_milliseconds(ttl_seconds), self._max_bytes]
        for one in appends:
            keys += _keys(one.session_id)
            args += (one.session_id.hex(), one.tenant)
            args += (one.owner.name, one.owner.generation, one.base, len(one.records), *one.records)
        return await self._asked(read(self._appended(keys, args), partial(_lengths, appends)))

    async def _appended(self, keys: list[bytes], args: list[Any]) -> Any:
        """A Redis may have less room than logs may take, and evict nothing: then those go that fill it."""
        try:
            return await self._append(keys=keys, args=args)
        except ResponseError as error:
            if FULL not in str(error):
                raise
        await self._make_room(args=[STAYS])
        return await self._append(keys=keys, args=args)

    async def take(
        self, session_id: SessionId, name: str, ttl_seconds: float, lead: Lead | None = None
    ) -> Taken | None:
        keys = _keys(session_id)
        args: list[Any] = [name, _milliseconds(ttl_seconds)]
        if lead is not None:
            keys.append(_keys(lead.session_id)[1])
            args += (lead.owner.name, lead.owner.generation)
        answer = await self._asked(read(self._take(keys=keys, args=args), partial(_taken, name)))
        if answer == SUPERSEDED:
            raise superseded()
        return cast(Taken | None, answer)

    async def read(self, session_id: SessionId) -> bytes | None:
        stream, _ = _keys(session_id)
        return await self._asked(read(self._redis.xrange(stream, "1-0", "1-0"), _only_record))

    async def cancel(self, session_id: SessionId) -> None:
        await self._asked(self._cancel(keys=_keys(session_id)))

    async def claim(self, session_id: SessionId) -> Claim | None:
        _, owner = _keys(session_id)
        known: Any = self._redis.hmget(owner, ["name", "generation", "cancelled"])
        return await self._asked(read(known, _claim))

    async def last(self, session_id: SessionId) -> bytes | None:
        stream, _ = _keys(session_id)
        return await self._asked(read(self._redis.xrevrange(stream, count=1), _only_record))


def _lengths(appends: Sequence[Append], answer: Any) -> list[int | None]:
    """Reads what APPEND answers."""
    lengths: list[int | None] = [one.base + len(one.records) for one in appends]
    for index, length in zip(answer[::2], answer[1::2], strict=True):
        if not 0 <= index < len(appends) or length < SUPERSEDED:
            raise ValueError("no log has such a length")
        lengths[index] = None if length == SUPERSEDED else length
    return lengths


def _taken(name: str, answer: Any) -> Any:
    """Reads what TAKE answers."""
    if answer is None or answer == SUPERSEDED:
        return answer
    generation, length, content = answer
    return Taken(Owner(name, int(generation)), int(length), whole_bytes(content))


def _only_record(entries: Any) -> bytes | None:
    """Reads one entry of a stream, or none."""
    found = entries[0][1].get(b"r") if entries else None
    return found if found is None else whole_bytes(found)


def _claim(answer: Any) -> Claim | None:
    name, generation, cancelled = answer
    if name is None or generation is None:
        return None
    try:
        owner = Owner(name.decode(), int(generation))
    except ValueError:  # somebody else has written there
        return None
    return Claim(owner, cancelled is not None) if 0 <= owner.generation < 10**MOST_DIGITS else None


def _keys(session_id: SessionId) -> list[bytes]:
    name = session_id.hex().encode()
    return [STREAM + name, OWNER + name]


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
