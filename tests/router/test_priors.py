"""What one router learns of a pair, the others know."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import Unavailable
from outrider.store.memory import MemoryStore
from router.priors import Priors, decode, encode
from router.speculation import PriorPool

KEY = "prior:target:draft"


def learnt(*sessions: tuple[int, int]) -> PriorPool:
    pool = PriorPool()
    for accepted, observed in sessions:
        pool.absorb(accepted, observed)
    return pool


async def test_what_one_router_learns_the_other_knows() -> None:
    store = MemoryStore()
    one, other = Priors(store), Priors(store)
    known = other.pool("target", "draft")
    for accepted in (90, 95):
        one.pool("target", "draft").absorb(accepted, 100)
    await one.share()
    await other.share()
    assert known == learnt((90, 100), (95, 100))
    assert known is other.pool("target", "draft")  # sessions hold it
    assert other.pool("target", "another") == PriorPool()


async def test_what_both_learn_is_counted_once_each() -> None:
    store = MemoryStore()
    one, other = Priors(store), Priors(store)
    one.pool("target", "draft").absorb(90, 100)
    other.pool("target", "draft").absorb(10, 100)
    for _ in range(3):
        await one.share()
        await other.share()
    assert one.pool("target", "draft") == other.pool("target", "draft") == learnt((90, 100), (10, 100))
    assert decode(await store.read(KEY)) == learnt((90, 100), (10, 100))


class Slow(MemoryStore):
    """Sessions end while it is asked; the first time it then is away."""

    pool: PriorPool
    away = True

    async def update(self, key: str, change: object) -> bytes:
        if self.away:
            self.away = False
            raise Unavailable("away")
        value = await super().update(key, change)  # type: ignore[arg-type]
        self.pool.absorb(50, 100)
        return value


async def test_nothing_is_lost_while_the_store_is_away_or_slow() -> None:
    store = Slow()
    priors = Priors(store)
    pool = store.pool = priors.pool("target", "draft")
    pool.absorb(90, 100)
    with pytest.raises(Unavailable):
        await priors.share()
    pool.absorb(80, 100)
    await priors.share()
    assert decode(await store.read(KEY)) == learnt((90, 100), (80, 100))
    assert pool == learnt((90, 100), (80, 100), (50, 100))
    assert list(pool.news) == [(50, 100)]


async def test_nonsense_in_the_store_is_replaced_and_learnt_by_nobody() -> None:
    store = MemoryStore()
    await store.update(KEY, lambda value: b"nonsense")
    priors = Priors(store)
    pool = priors.pool("target", "draft")
    await priors.share()
    assert pool == PriorPool()
    pool.absorb(90, 100)
    await priors.share()
    assert decode(await store.read(KEY)) == learnt((90, 100))


@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 10**9))
def test_a_pool_is_written_as_it_is(mean: float, variance: float, sessions: int) -> None:
    pool = PriorPool(mean, variance, sessions)
    assert decode(encode(pool)) == pool


@pytest.mark.parametrize(
    "raw",
    [
        None,
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"mean": "x", "variance": 0, "sessions": 0}',
        b'{"mean": NaN, "variance": 0, "sessions": 0}',
        b'{"mean": 1.5, "variance": 0, "sessions": 0}',
        b'{"mean": 0.5, "variance": Infinity, "sessions": 0}',
        b'{"mean": 0.5, "variance": -1, "sessions": 0}',
        b'{"mean": 0.5, "variance": 0, "sessions": -5}',
        b'{"mean": 0.5, "variance": 0, "sessions": Infinity}',
    ],
)
def test_what_makes_no_sense_is_nothing(raw: bytes | None) -> None:
    assert decode(raw) is None
