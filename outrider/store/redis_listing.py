"""The workers that a Redis knows, asked for so that what has not changed is not asked again.

| key | type | content |
|---|---|---|
| `outrider:workers` | sorted set | the ROLE:IDs of the workers, each with its mark: when it came or changed |
| `outrider:alive` | sorted set | the same ROLE:IDs by the time at which their records expire (unix ms) |
| `outrider:mark` | string | the mark of the last change; another one than before means that there is something new |

A mark is a time in unix microseconds: a Redis that has lost what it was told last does not give one twice.
"""  # noqa: E501 (a table)

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from redis.asyncio import Redis

from outrider.errors import InvalidRequest
from outrider.store.redis_answers import Asked, read, whole_bytes
from outrider.store.redis_keys import KEEP
from outrider.wire.description import WorkerRecord
from outrider.wire.hello import WorkerKey
from outrider.wire.registry import RECORD

log = logging.getLogger(__name__)

WORKER, INDEX, ALIVE, MARK, EPOCH = (
    f"outrider:{name}" for name in ("worker:", "workers", "alive", "mark", "epoch")
)
RECORDS_AT_ONCE = 64  # that are read before others have their turn

NOW = (
    KEEP
    + """
local function mark()
  local time = redis.call('TIME')
  local found = string.format('%.0f', time[1] * 1e6 + time[2])
  redis.call('SET', KEYS[2], found)
  return found
end
"""
)
# KEYS: index, mark, alive, epoch. ARGV: a new epoch, the prefix of records' keys, how long an epoch lives in
# ms, and the epoch and the mark that are known.
LIST = (
    NOW
    + """
keep('zset', KEYS[1], KEYS[3])
keep('string', KEYS[2], KEYS[4])
redis.call('SET', KEYS[4], ARGV[1], 'NX')
redis.call('PEXPIRE', KEYS[4], ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], 0, now, 'LIMIT', 0, 1000)) do
  local left = redis.call('PTTL', ARGV[2] .. id)
  if left > 0 then
    redis.call('ZADD', KEYS[3], now + left, id)
  else
    redis.call('ZREM', KEYS[3], id)
    redis.call('ZREM', KEYS[1], id)
    mark()
  end
end
local epoch, last = redis.call('GET', KEYS[4]), redis.call('GET', KEYS[2]) or '0'
if epoch == ARGV[4] and last == ARGV[5] then return {epoch, last} end
return {epoch, last, redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')}
"""
)
# KEYS: index, alive. ARGV: the prefix, ROLE:IDs. What is no worker's record stands in nobody's way.
FETCH = """
local found = {}
for i = 2, #ARGV do
  local record = redis.pcall('HGET', ARGV[1] .. ARGV[i], 'record')
  if type(record) ~= 'string' then
    redis.call('ZREM', KEYS[1], ARGV[i])
    redis.call('ZREM', KEYS[2], ARGV[i])
    record = ''
  end
  found[i - 1] = record
end
return found
"""


class Listing:
    """What one watcher knows."""

    def __init__(self, redis: Redis, asked: Asked, epoch_ms: int) -> None:
        """`epoch_ms`: how long an epoch outlives the last listing."""
        self._asked = asked
        self._epoch_ms = epoch_ms
        self._list, self._fetch = redis.register_script(LIST), redis.register_script(FETCH)
        self._epoch, self._mark = b"", b""
        self._known: dict[bytes, tuple[bytes, WorkerRecord | None]] = {}  # by ROLE:ID, with its mark
        self._records: Mapping[WorkerKey, WorkerRecord] = {}

    async def ask(self) -> tuple[bytes, Mapping[WorkerKey, WorkerRecord]]:
        """Returns the epoch and the live records: the same object as before if nothing has changed. A load is
        as it was when its worker came or changed. Raises Unavailable."""
        fresh = secrets.token_hex(8)
        asked = self._list(
            keys=[INDEX, MARK, ALIVE, EPOCH], args=[fresh, WORKER, self._epoch_ms, self._epoch, self._mark]
        )
        epoch, mark, marks = await self._asked(read(asked, _listed))
        if marks is not None:
            await self._read(marks)
        self._epoch, self._mark = epoch, mark
        return epoch, self._records

    async def _read(self, marks: Mapping[bytes, bytes]) -> None:
        unknown = [name for name, mark in marks.items() if self._known.get(name, (b"",))[0] != mark]
        self._known = {name: self._known[name] for name in marks if name in self._known}
        for start in range(0, len(unknown), RECORDS_AT_ONCE):
            names = unknown[start : start + RECORDS_AT_ONCE]
            asked = self._fetch(keys=[INDEX, ALIVE], args=[WORKER, *names])
            found = await self._asked(read(asked, partial(_records, names)))
            self._known.update({name: (marks[name], record) for name, record in found.items()})
        records = (record for _, record in self._known.values())
        self._records = {one.info.identity.key: one for one in records if one is not None}


def _listed(answer: Any) -> tuple[bytes, bytes, dict[bytes, bytes] | None]:
    """Reads what LIST answers: (epoch, mark, marks by ROLE:ID), None if nothing has changed."""
    epoch, mark, *changed = answer
    if changed:
        (listed,) = changed
        return epoch, mark, dict(zip(listed[::2], listed[1::2], strict=True))
    return epoch, mark, None


def _records(names: Sequence[bytes], answer: Any) -> dict[bytes, WorkerRecord | None]:
    """Reads what FETCH answers."""
    return {name: _record(whole_bytes(one)) for name, one in zip(names, answer, strict=True)}


def _record(raw: bytes) -> WorkerRecord | None:
    """Returns None if there is none, or none that is understood."""
    try:
        return RECORD.from_bytes(raw) if raw else None
    except InvalidRequest as error:
        log.debug("a record in the store is not understood: %s", error.message)
        return None
