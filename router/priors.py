"""What is known of each (target, draft) pair's acceptance, shared with the other routers through the store.

Sessions read and write the pools of this process; a task in the background carries what is new to the store
and what others have learnt back.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from functools import partial
from typing import NoReturn

from outrider.errors import OutriderError
from outrider.store.store import Store
from router.speculation import PriorPool

log = logging.getLogger(__name__)

SHARE_SECONDS = 2.0

Pair = tuple[str, str]
"""(target fingerprint, draft fingerprint)"""


class Priors:
    """A pool a pair. `pool` gives the same object every time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pools: dict[Pair, PriorPool] = {}

    def pool(self, target: str, draft: str) -> PriorPool:
        return self._pools.setdefault((target, draft), PriorPool())

    async def run(self) -> NoReturn:
        """Shares every SHARE_SECONDS, until it is cancelled."""
        while True:
            try:
                await self.share()
            except OutriderError as error:
                log.debug("priors are not shared: %s", error.message)  # whoever watches the store says it
            await asyncio.sleep(SHARE_SECONDS)

    async def share(self) -> None:
        """One exchange for each pair. Raises Unavailable; then nothing of this router's is lost."""
        for (target, draft), pool in list(self._pools.items()):
            key = f"prior:{target}:{draft}"
            news = list(pool.news)
            if news:
                shared = decode(await self._store.update(key, partial(_absorbed, news)))
            else:
                shared = decode(await self._store.read(key))
            if shared is not None:
                _adopt(pool, shared, len(news))


def encode(pool: PriorPool) -> bytes:
    return json.dumps({"mean": pool.mean, "variance": pool.variance, "sessions": pool.sessions}).encode()


def decode(raw: bytes | None) -> PriorPool | None:
    """None where there is nothing, or nothing that makes sense."""
    if raw is None:
        return None
    try:
        found = json.loads(raw)
        pool = PriorPool(float(found["mean"]), float(found["variance"]), int(found["sessions"]))
    except (ValueError, TypeError, KeyError, OverflowError):
        return None
    sound = 0 <= pool.mean <= 1 and math.isfinite(pool.variance) and pool.variance >= 0
    return pool if sound and pool.sessions >= 0 else None


def _absorbed(news: list[tuple[int, int]], raw: bytes | None) -> bytes:
    pool = decode(raw) or PriorPool()
    for accepted, observed in news:
        pool.absorb(accepted, observed)
    return encode(pool)


def _adopt(pool: PriorPool, shared: PriorPool, told: int) -> None:
    """Takes over the shared state, which has the first `told` of our news in it, and adds the later ones."""
    later = list(pool.news)[told:]
    pool.news.clear()
    pool.mean, pool.variance, pool.sessions = shared.mean, shared.variance, shared.sessions
    for accepted, observed in later:
        pool.absorb(accepted, observed)
